"""The processes below this one, and how they are made to end (Linux; elsewhere nothing is seen of them)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

_SET_CHILD_SUBREAPER = 36  # prctl(2)
_LOOK_SECONDS = 0.05
_AFTER_KILL_SECONDS = 30.0


def adopt_orphans() -> None:
    """From now on processes below this one stay below it when those between end (PR_SET_CHILD_SUBREAPER)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """Processes that run below this one, those that have ended but are not waited for left out."""
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
    """Send SIGTERM to all processes below this one, SIGKILL to those that run ``grace`` seconds later.

    Returns:
        Those that even then did not end: the kernel holds them.
    """
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, _AFTER_KILL_SECONDS)):
        told: set[int] = set()
        deadline = time.monotonic() + seconds
        while running := descendants():
            _send(number, [pid for pid in running if pid not in told])
            told.update(running)
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
    """Let go of adopted children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
