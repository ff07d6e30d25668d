"""Limits of a process, in words and for real in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ppfleetx.doctor.case import Case
from ppfleetx.doctor.limits import LIMITS, limit_row, locked_row
from ppfleetx.doctor.rows import Status
from tests.helpers.ranks import ROOT

BY_TITLE = {limit.title: limit for limit in LIMITS}


@pytest.mark.parametrize(
    ("title", "soft", "hard", "status", "cure"),
    [
        ("open files", 64, 1 << 20, Status.FAIL, "ulimit -n 65536 before"),
        ("open files", 1024, 2048, Status.WARN, "/etc/security/limits.conf"),
        ("open files", 65536, 65536, Status.OK, ""),
        ("address space", 1 << 30, 1 << 30, Status.FAIL, "ulimit -v unlimited"),
        ("address space", 1 << 40, -1, Status.WARN, "ulimit -v unlimited"),
        ("address space", -1, -1, Status.OK, ""),
        ("file size", 1 << 20, -1, Status.FAIL, "ulimit -f unlimited"),
        ("processor time", 3600, -1, Status.FAIL, "ulimit -t unlimited"),
        ("processes", 100, -1, Status.FAIL, "ulimit -u 65536"),
    ],
)
def test_a_limit_in_words(title, soft, hard, status, cure):
    row = limit_row(BY_TITLE[title], soft, hard)
    assert row.status is status and cure in row.cure
    assert bool(row.cure) == (status is not Status.OK)


def test_cuda_reserves_more_than_any_limit_of_address_space():
    assert limit_row(BY_TITLE["address space"], 1 << 40, -1, is_gpu=True).status is Status.FAIL


def test_locked_memory_is_a_failure_where_infiniband_is_used_alone():
    assert locked_row(8 << 20, Case(device="cpu")).status is Status.WARN
    assert locked_row(8 << 20, Case(device="gpu", world_size=8, local_size=8)).status is Status.WARN
    assert locked_row(8 << 20, Case(device="gpu", world_size=16, local_size=8)).status is Status.FAIL


def test_limits_of_a_real_process_are_found():
    text = (
        "import json; from ppfleetx.doctor.case import Case; from ppfleetx.doctor.limits import limits; "
        "print(json.dumps({row.name: row.status for row in limits(Case())}))"
    )
    command = ["sh", "-c", 'ulimit -n 64; ulimit -f 1000; exec "$@"', "sh", sys.executable, "-c", text]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    told = json.loads(done.stdout)
    assert told["open files"] == told["file size"] == "fail" and "address space" not in told
