"""Limits of a process, as numbers and for real in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ppfleetx.doctor.check import Status, Target
from ppfleetx.doctor.environment import locked_row, open_files_row
from tests.helpers.ranks import ROOT


@pytest.mark.parametrize(
    ("soft", "hard", "status", "fix"),
    [
        (64, 1 << 20, Status.FAIL, "ulimit -n 65536 before"),
        (1024, 2048, Status.WARN, "/etc/security/limits.conf"),
        (65536, 65536, Status.OK, ""),
        (-1, -1, Status.OK, ""),
    ],
)
def test_open_files(soft, hard, status, fix):
    row = open_files_row(soft, hard)
    assert row.status is status and fix in row.fix
    assert bool(row.fix) == (status is not Status.OK)


def test_locked_memory_is_a_failure_only_where_infiniband_is_used():
    assert locked_row(8 << 20, Target(device="cpu")).status is Status.WARN
    assert locked_row(8 << 20, Target(device="gpu", world_size=8, local_size=8)).status is Status.WARN
    assert locked_row(8 << 20, Target(device="gpu", world_size=16, local_size=8)).status is Status.FAIL


def test_limits_of_a_real_process_are_found():
    text = (
        "import json; from ppfleetx.doctor.check import Target; "
        "from ppfleetx.doctor.environment import limits; "
        "print(json.dumps({row.name: row.status for row in limits(Target())}))"
    )
    command = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", sys.executable, "-c", text]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    assert found["open files"] == "fail" and "shared memory" in found
