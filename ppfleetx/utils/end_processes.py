"""Make sure that no process of a job is left running: a rank ends with its launcher, and a supervisor can end
all of its descendants."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path

LAUNCHER = "paddle.distributed.launch"
LAUNCHER_VARIABLE = "PPFLEETX_LAUNCHER_PID"
_SET_BY_LAUNCHER = "PADDLE_RANK_IN_NODE"  # set only by the launcher
_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
_LOOK_AT_PARENT_SECONDS = 1.0
_SAVE_SECONDS = 60.0  # time for a rank to finish its step and save

_watched: set[int] = set()
_SET_CHILD_SUBREAPER = 36  # prctl(2)
_LOOK_SECONDS = 0.05
_AFTER_KILL_SECONDS = 30.0


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a command to stop: SIGTERM, SIGINT and, unless it is ignored (``nohup``),
    SIGHUP."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if is_ignored else [signal.SIGHUP])]


# -- a rank and its launcher ------------------------------------------------------------


def end_with_launcher() -> None:
    """Make this rank end when its launcher ends: by SIGTERM, and later by SIGKILL. Has no effect unless
    Paddle's launcher started this process."""
    if _SET_BY_LAUNCHER not in os.environ or os.getpid() in _watched:
        return
    _watched.add(os.getpid())
    parent = os.getppid()
    given = os.environ.get(LAUNCHER_VARIABLE, "")
    launcher = int(given) if given.isdigit() else parent
    if launcher == parent:  # false if a shell script between the two started this rank
        end_child_with_parent()
    threading.Thread(target=_watch, args=(launcher, launcher == parent), name="launcher", daemon=True).start()


def end_child_with_parent() -> None:
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


def _watch(launcher: int, is_parent: bool) -> None:
    _wait_for_end(launcher, is_parent)
    with contextlib.suppress(OSError, ValueError):
        text = f"the launcher (process {launcher}) is gone: this rank stops as after SIGTERM"
        print(text, file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SAVE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_end(pid: int, is_parent: bool) -> None:
    with contextlib.suppress(OSError, AttributeError), os.fdopen(os.pidfd_open(pid)) as process:
        if not is_parent or os.getppid() == pid:  # check that no other process has reused the number
            end = select.poll()
            end.register(process, select.POLLIN)
            end.poll()
        return
    # The launcher has ended already, or this system has no pidfd_open.
    while os.getppid() == pid if is_parent else process_exists(pid):
        time.sleep(_LOOK_AT_PARENT_SECONDS)


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


# -- descendants of this process --------------------------------------------------------


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parents end, so that :func:`descendants`
    still finds them (PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """Return the ids of all running descendants of this process. Zombies are not included."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = entry.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry.parent.name))
    found, pending = [], [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return sorted(found)


def end_descendants(grace: float) -> list[int]:
    """End all descendants of this process: by SIGTERM, and ``grace`` seconds later by SIGKILL. Returns the
    ids of the processes that still run."""
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, _AFTER_KILL_SECONDS)):
        signaled: set[int] = set()
        deadline = time.monotonic() + seconds
        while running := descendants():
            _send(number, [pid for pid in running if pid not in signaled])
            signaled.update(running)
            if time.monotonic() >= deadline:
                break
            _reap()
            time.sleep(_LOOK_SECONDS)
        if not running:
            break
    _reap()
    return running


def _send(number: signal.Signals, pids: Collection[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
