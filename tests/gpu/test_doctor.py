"""``ppfleetx doctor`` on the machine: all that it says goes into the report."""

import json
import sys

import pytest

from tests.helpers import programs

pytestmark = pytest.mark.gpu


def test_the_doctor_finds_nothing_wrong(here, tmp_path, record_property):
    command = [sys.executable, "-m", "ppfleetx", "doctor", "--json"]
    done = programs.run(command, timeout=600, executed=here.has_gpu, cwd=tmp_path)
    found = json.loads(done.stdout[done.stdout.index("{") :])
    rows = found["rows"]
    record_property("rows", rows)
    assert {"group", "name", "status", "found", "cure"} <= set(rows[0])
    failed = [f"{row['name']}: {row['found']}; {row['cure']}" for row in rows if row["status"] == "fail"]
    assert (done.returncode, failed) == (0, []), done.stderr
