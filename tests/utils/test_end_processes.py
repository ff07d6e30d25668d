"""A rank whose launcher was killed stops and saves, or is ended; a process without a launcher goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.leftovers import children, leftovers
from tests.helpers.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import os, pathlib, signal, sys, time
from ppfleetx.utils import exit_codes, end_processes

directory, how = pathlib.Path(sys.argv[1]), sys.argv[2]
end_processes._LOOK_AT_PARENT_SECONDS = 0.1

def save(number, frame):
    (directory / "saved").touch()
    if how == "saves":
        sys.exit(0)

def main():
    signal.signal(signal.SIGTERM, save)
    if how == "hangs":
        end_processes._SAVE_SECONDS = 0.5
    (directory / "pid").write_text(str(os.getpid()))
    for _ in range(1200):
        time.sleep(0.05)

exit_codes.run_tool(main)
"""


class Launcher:
    """A process that starts a rank in a session of its own, as Paddle's does, and is killed."""

    def __init__(self, directory: Path, how: str, *, between: str = "", **environ: str) -> None:
        rank = [sys.executable, "-c", RANK, str(directory), how]
        command = ["sh", "-c", f'{between}"$@"; true', "sh", *rank] if between else rank
        program = f"import subprocess; subprocess.run({command!r}, start_new_session=True)"
        if between:
            program = f"import os; os.environ['PPFLEETX_LAUNCHER_PID'] = str(os.getpid()); {program}"
        self.before, self._directory = children(), directory
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, **environ}
        )
        wait_for(lambda: (directory / "pid").exists() and (directory / "pid").read_text())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def has_saved(self) -> bool:
        return (self._directory / "saved").exists()


@pytest.mark.parametrize("between", ["", "umask 022; "], ids=["direct", "script between"])
def test_a_rank_saves_and_ends_when_its_launcher_was_killed(tmp_path: Path, between: str) -> None:
    launcher = Launcher(tmp_path, "saves", between=between, PADDLE_RANK_IN_NODE="0")
    launcher.kill()
    assert leftovers(launcher.before, 10) == {}
    assert launcher.has_saved


def test_a_rank_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "hangs", PADDLE_RANK_IN_NODE="0")
    launcher.kill()
    assert leftovers(launcher.before, 10) == {}
    assert launcher.has_saved  # it was asked first


def test_a_process_that_no_launcher_started_outlives_its_parent(tmp_path: Path) -> None:
    """Like a run started with nohup, whose shell ends."""
    launcher = Launcher(tmp_path, "saves")
    launcher.kill()
    left = leftovers(launcher.before, 1)
    assert [*left] == [int((tmp_path / "pid").read_text())]  # leftovers sees orphans
    assert not launcher.has_saved
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert leftovers(launcher.before, 5) == {}
