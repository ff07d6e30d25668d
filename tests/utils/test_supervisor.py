"""The supervisor: bounded restarts, no restart of a user's mistake, nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SUPERVISE = str(Path(__file__).resolve().parents[2] / "tools/supervise.py")
# Counts its starts in a file, then does what it is told.
COUNTING = """
import os, pathlib, subprocess, sys, time
file = pathlib.Path(sys.argv[1])
starts = int(file.read_text()) + 1 if file.exists() else 1
file.write_text(str(starts))
{action}
"""


def supervise(tmp_path: Path, action: str, *options: str) -> tuple[subprocess.CompletedProcess[str], int]:
    command = [sys.executable, SUPERVISE, "--backoff", "0.05", *options, "--"]
    command += [sys.executable, "-c", COUNTING.format(action=action), str(tmp_path / "starts")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done, int((tmp_path / "starts").read_text())


def test_restarts_until_the_command_ends_well(tmp_path: Path) -> None:
    done, starts = supervise(tmp_path, "sys.exit(0 if starts == 3 else 1)")
    assert (done.returncode, starts) == (0, 3), done.stdout


def test_gives_up_after_the_bound(tmp_path: Path) -> None:
    done, starts = supervise(tmp_path, "sys.exit(7)", "--max-restarts", "2")
    assert (done.returncode, starts) == (7, 3), done.stdout
    assert "giving up" in done.stdout


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    done, starts = supervise(tmp_path, "sys.exit(2)")
    assert (done.returncode, starts) == (2, 1), done.stdout


def test_every_start_asks_to_resume(tmp_path: Path) -> None:
    _, starts = supervise(tmp_path, "sys.exit(sys.argv[2:] != ['-o', 'Engine.save_load.resume=auto'])")
    assert starts == 1


def test_what_outlives_the_command_is_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    action = (
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))"
    )
    done, _ = supervise(tmp_path, action)
    assert done.returncode == 0
    wait_until_gone(int(pid_file.read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_command_and_ends_the_supervisor(tmp_path: Path, number: signal.Signals) -> None:
    action = (
        "import signal\n"
        "def stop(*_):\n"
        f"    pathlib.Path({str(tmp_path / 'stopped')!r}).touch(); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop)\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(60)"
    )
    command = [sys.executable, SUPERVISE, "--backoff", "0.05", "--", sys.executable, "-c"]
    process = subprocess.Popen(
        [*command, COUNTING.format(action=action), str(tmp_path / "starts")], stdout=subprocess.PIPE
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert (tmp_path / "stopped").exists()
    assert (tmp_path / "starts").read_text() == "1"


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if "zombie" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")
