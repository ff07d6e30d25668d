"""The supervisor: limited restarts, none after a user's mistake, and no process left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.resilience.supervisor import with_resume
from tests.helpers.leftovers import children, leftovers
from tests.helpers.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
SUPERVISE = str(ROOT / "tools/supervise.py")
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


@pytest.mark.parametrize(
    ("action", "options", "code", "starts"),
    [
        ("sys.exit(0 if starts == 3 else 1)", (), 0, 3),
        ("sys.exit(7)", ("--max-restarts", "2"), 7, 3),  # it gives up
        ("sys.exit(2)", (), 2, 1),  # a user's mistake is not tried again
        ("sys.exit(130)", (), 130, 1),  # nor is Ctrl-C
        ("sys.exit(sys.argv[2:] != ['-o', 'Engine.save_load.resume=auto'])", (), 0, 1),
    ],
)
def test_how_often_a_command_is_started(
    tmp_path: Path, action: str, options: tuple[str, ...], code: int, starts: int
) -> None:
    done, found = supervise(tmp_path, action, *options)
    assert (done.returncode, found) == (code, starts), done.stdout


RESUME = "Engine.save_load.resume"


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ([], ["-o", f"{RESUME}=auto"]),
        (["-o", "Engine.max_steps=5", f"-o{RESUME}2=x"], ["-o", f"{RESUME}=auto"]),
        (["-o", f"{RESUME}=auto"], []),
        ([f"-o{RESUME} = auto"], []),
        ([f"--override={RESUME}=True"], []),
        (["--override", f"{RESUME}='auto'", "-o", "Engine.max_steps=5"], []),
    ],
)
def test_resuming_is_added_where_the_command_does_not_say_it(given: list[str], added: list[str]) -> None:
    command = ["python", "tools/train.py", "-c", "FILE", *given]
    assert with_resume(command) == [*command, *added]


def test_a_command_that_does_not_resume_is_refused() -> None:
    """A restart would begin anew and, with ``overwrite``, delete the checkpoints of the first start."""
    command = [sys.executable, SUPERVISE, "--", "python", "tools/train.py", "-o", f"{RESUME}=False"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"{RESUME} = 'False' (the supervised command)" in done.stderr
    assert "Traceback" not in done.stderr
    for given in ("off", "null", ""):
        with pytest.raises(ConfigError, match="leave the override out"):
            with_resume(["python", "tools/train.py", "-o", f"{RESUME}={given}"])


def test_the_command_of_the_readme_is_accepted() -> None:
    """A run that was told to resume is supervised like any other."""
    overrides = ["-o", f"{RESUME}=auto", "--check"]
    file = "ppfleetx/configs/nlp/gpt/pretrain_gpt_tiny.yaml"
    command = [sys.executable, SUPERVISE, "--", sys.executable, "tools/train.py", "-c", file, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_what_outlives_the_command_is_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    action = (
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))"
    )
    done, _ = supervise(tmp_path, action)
    assert done.returncode == 0
    wait_for(lambda: is_gone(int(pid_file.read_text())), 10)


# A rank in a session of its own, whose launcher is killed: it stops after a while, or not at all.
ORPHAN = """
import os, pathlib, signal, sys, time
end = pathlib.Path(sys.argv[1])
end.with_name("runs").touch()
def stop(*_):
    if sys.argv[2] == "late":
        time.sleep(0.7); end.touch(); sys.exit()
signal.signal(signal.SIGTERM, stop)
end.with_name("ready").touch()
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize(("how", "grace"), [("late", "30"), ("never", "0.5")])
def test_a_restart_waits_until_the_ranks_of_a_killed_launcher_have_ended(
    tmp_path: Path, how: str, grace: str
) -> None:
    end = tmp_path / "end"
    action = f"""
import signal
if starts == 1:
    command = [sys.executable, "-c", {ORPHAN!r}, {str(end)!r}, {how!r}]
    rank = subprocess.Popen(command, start_new_session=True)
    file.with_name("rank").write_text(str(rank.pid))
    while not file.with_name("ready").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
alive = pathlib.Path("/proc/" + file.with_name("rank").read_text()).exists()
sys.exit(5 if alive else 0)
"""
    done, starts = supervise(tmp_path, action, "--grace", grace, "--max-restarts", "1")
    assert (done.returncode, starts) == (0, 2), done.stdout
    rank = (tmp_path / "rank").read_text()
    assert f"the command has ended, but not process {rank} below it" in done.stdout
    assert "they have ended" in done.stdout
    assert end.exists() == (how == "late")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_the_command_and_ends_the_supervisor(tmp_path: Path, number: signal.Signals) -> None:
    """When the supervisor is killed, its command gets SIGTERM."""
    action = (
        "import signal\n"
        "def stop(*_):\n"
        f"    pathlib.Path({str(tmp_path / 'stopped')!r}).touch(); sys.exit(1)\n"
        "for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(one, stop)\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(60)"
    )
    before = children()
    command = [sys.executable, SUPERVISE, "--backoff", "0.05", "--", sys.executable, "-c"]
    command += [COUNTING.format(action=action), str(tmp_path / "starts")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # also if the tests run under nohup
    )
    wait_for((tmp_path / "ready").exists)
    process.send_signal(number)
    process.wait(30)
    assert leftovers(before, 10) == {}
    assert (tmp_path / "stopped").exists()
    assert (tmp_path / "starts").read_text() == "1"


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        os.kill(pid, 0)
        return "zombie" in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return True
