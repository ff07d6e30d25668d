"""``ppfleetx doctor`` on the machine: all that it says goes into the report."""

import json
import sys

import pytest

from tests.helpers import programs

pytestmark = pytest.mark.device


@pytest.mark.parametrize("together", [False, True], ids=["one process", "a process for each card"])
def test_the_doctor_finds_nothing_wrong(here, need_cards, tmp_path, record_property, together):
    if together:
        need_cards(2)
    command = [sys.executable, "-m", "ppfleetx", "doctor", "--json"]
    command += ["--nproc", str(here.cards)] if together else []
    done = programs.run(command, timeout=900, executed=True, cwd=tmp_path)
    assert "{" in done.stdout, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])
    rows = found["rows"]
    record_property("rows", rows)
    assert {"group", "name", "status", "found", "cure"} <= set(rows[0])
    failed = [f"{row['name']}: {row['found']}; {row['cure']}" for row in rows if row["status"] == "fail"]
    assert (done.returncode, failed) == (0, []), done.stderr
