"""The whole examination of one process, the process that starts ranks, and ranks that do not end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ppfleetx.commands import main
from ppfleetx.commands.doctor import Doctor, _target
from ppfleetx.doctor import launch, run
from ppfleetx.doctor.environment import open_files_row
from ppfleetx.doctor.launch import examine_nodes_first, launched_rows, leave_report
from ppfleetx.doctor.process_connections import connect_processes
from ppfleetx.doctor.registry import Check
from ppfleetx.doctor.results import Row, Status, Target, fail, ok
from ppfleetx.doctor.run import examine_job
from tests.doctor.conftest import by_name
from tests.helpers.ranks import ROOT, free_port


@pytest.fixture
def quick(monkeypatch):
    """Only the checks that take no time."""
    chosen = tuple(
        check for check in run.CHECKS if check.group in ("environment", "network", "configuration")
    )
    monkeypatch.setattr(run, "CHECKS", chosen)


def test_the_verb_prints_one_json_object_and_gives_the_exit_code(capsys, quick):
    assert main.call("doctor", ["--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    names = {row["name"] for row in content["rows"]}
    assert content["ok"] and {"python", "paddle", "libraries", "interfaces", "import paddle"} <= names
    assert main.call("doctor", ["-c", "no/such/file.yaml"]) == 1
    text = capsys.readouterr().out
    assert "no/such/file.yaml" in text and "1 check failed" in text


def test_both_builds_of_paddle_and_the_variables_are_named(monkeypatch):
    from ppfleetx.doctor import environment

    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.3.1")
    rows = by_name(environment.versions(Target()))
    assert rows["paddle"].status is Status.FAIL and "both builds are installed" in rows["paddle"].found
    rows = by_name(environment.variables(Target(environ={"NCCL_DEBUG": "INFO", "PADDLE_TRAINER_ID": "3"})))
    assert rows["variables"].found == "NCCL_DEBUG=INFO"


# -- ranks -----------------------------------------------------------------------------------------


def test_two_ranks_join_their_rows_and_one_that_differs_ends_before_the_process_groups(monkeypatch):
    """In threads: what they exchange is real, and process groups are not reached."""
    port = free_port()
    check = Check("files", "files", "data", "data")
    monkeypatch.setattr(run, "CHECKS", (check,))
    monkeypatch.setattr(run, "meeting_point", lambda: ("127.0.0.1", port))

    def rows_of(check: Check, target: Target) -> list[Row]:
        found = ok("data", "read") if target.rank == 0 else fail("data", "gone", "mount it")
        return [replace(found, group="environment")]

    def rank(number: int) -> list[Row]:
        target = Target(None, "cpu", number, 2, 0, 1, environ={})
        return examine_job(target, seconds=10.0, finish=lambda rows: None)

    monkeypatch.setattr(run, "examine", rows_of)
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(rank, range(2)))
    assert told[0] == told[1]
    statuses = {(row.name, row.ranks): row.status for row in told[0] if row.group == "environment"}
    assert statuses == {("data", (0,)): Status.OK, ("data", (1,)): Status.FAIL}
    rows = by_name(told[0])
    assert rows["versions"].status is Status.OK
    assert rows["collectives"].status is Status.SKIPPED


def test_a_rank_that_never_comes_is_a_row(monkeypatch, quick):
    monkeypatch.setattr(run, "meeting_point", lambda: ("127.0.0.1", free_port()))
    rows = by_name(examine_job(Target(rank=0, world_size=2), seconds=0.5, finish=lambda rows: None))
    assert rows["meeting"].status is Status.FAIL and rows["meeting"].group == "processes"
    assert "rank 1 did not connect" in rows["meeting"].found and "python" in rows


def test_without_the_first_rank_the_others_keep_what_they_have_found(monkeypatch):
    port = free_port()
    monkeypatch.setattr(run, "meeting_point", lambda: ("127.0.0.1", port))
    monkeypatch.setattr(run, "CHECKS", (Check("files", "files", "data", "data"),))
    monkeypatch.setattr(run, "examine", lambda check, target: [fail("data", "gone", "mount it")])
    target = Target(None, "cpu", 1, 2, 0, 1, environ={})
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(examine_job, target, seconds=10.0, finish=lambda rows: None)
        connect_processes(("", port), 2, "rank 0", 10.0, is_host=True, number=0).close()
        told = by_name(others.result())
    assert told["data"].found == "gone" and "is gone" in told["first rank"].found


# -- the process that starts them ------------------------------------------------------------------


def test_the_report_of_the_ranks_is_read_and_nothing_is_left(tmp_path):
    leave_report([ok("python", "3.11")], 4, str(tmp_path), 0)
    (file,) = tmp_path.iterdir()
    content = file.read_text()
    place = f"os.environ['{launch.DIRECTORY_VARIABLE}'] + '/{file.name}'"
    command = [sys.executable, "-c", f"import os; open({place}, 'w').write({content!r})"]
    (row,), size = launched_rows(command, seconds=1.0, log_dir=None)
    assert (row.name, size) == ("python", 4)


STOPS = """
import os, signal, sys, threading, time

def wait():
    while "ppfleetx.doctor.collectives" not in sys.modules:  # imported when process groups are joined
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGSTOP)

if os.environ.get("PADDLE_TRAINER_ID") == "1":
    with open(os.environ["STOPPED_PID"], "w") as file:
        file.write(str(os.getpid()))
    threading.Thread(target=wait, daemon=True).start()
"""


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_and_killed(tmp_path):
    """A whole job: its first rank waits for the other, gives up, and tells why; nothing is left running."""
    (tmp_path / "sitecustomize.py").write_text(STOPS)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
    environ |= {"PYTHONPATH": f"{tmp_path}:{ROOT}", "STOPPED_PID": str(tmp_path / "pid")}
    command = [sys.executable, "-m", "ppfleetx", "doctor", "--nproc", "2", "--timeout", "6", "--json"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    rows = [row for row in json.loads(done.stdout)["rows"] if row["status"] == "fail"]
    assert done.returncode == 1
    told = {row["name"]: row["found"] for row in rows}
    assert set(told) == {"rank 1", "communication"}
    assert "no answer within 36 s; it was last heard of at: joining the process groups" in told["rank 1"]
    assert told["communication"] == "joining the process groups did not end within 6 s"
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def test_several_machines_need_a_place_to_meet():
    assert examine_nodes_first(1, None, 1.0) == []
    (row,) = examine_nodes_first(2, None, 1.0)
    assert row.status is Status.FAIL and "--master" in row.fix


def test_a_rank_knows_its_place(monkeypatch):
    there = {"PADDLE_TRAINER_ID": "3", "PADDLE_TRAINERS_NUM": "4", "PADDLE_LOCAL_RANK": "1"}
    for name, value in {**there, "PADDLE_LOCAL_SIZE": "2"}.items():
        monkeypatch.setitem(os.environ, name, value)
    target = _target(Doctor())
    assert (target.rank, target.world_size, target.local_rank, target.local_size) == (3, 4, 1, 2)
    assert target.cfg is None and target.found == ()
    target = _target(Doctor(config="debug/gpt_nano", override=("Distributed.mp_degree=3",)))
    assert target.cfg is None and target.found[0].status is Status.FAIL


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


def test_limits_of_a_real_process_are_found():
    text = (
        "import json; from ppfleetx.doctor.results import Target; "
        "from ppfleetx.doctor.environment import limits; "
        "print(json.dumps({row.name: row.status for row in limits(Target())}))"
    )
    command = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", sys.executable, "-c", text]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    assert found["open files"] == "fail" and "shared memory" in found
