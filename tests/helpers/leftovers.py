"""Processes that a test has started and not ended: also those whose parent is gone.

The test's process adopts orphans, so that the ranks of a launcher that was killed do not become strangers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from ppfleetx.utils.end_processes import adopt_orphans
from tests.helpers import ranks

_PATIENCE_SECONDS = 5.0


def children() -> set[int]:
    """Processes that run right below this one, the nursery left out."""
    adopt_orphans()
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found.update(map(int, (thread / "children").read_text().split()))
    if ranks.shared_nursery.cache_info().currsize:
        found.discard(ranks.shared_nursery().pid)
    return {pid for pid in found if _runs(pid)}


def leftovers(before: set[int], patience: float = _PATIENCE_SECONDS) -> dict[int, str]:
    """Children that were not there ``before`` and do not end in time: number and command."""
    deadline = time.monotonic() + patience
    while (left := children() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return {pid: _command(pid) for pid in sorted(left)}


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Within it nothing may be started that runs on; what does is killed.

    Raises:
        AssertionError: something did.
    """
    before = children()
    yield
    left = leftovers(before)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"left running: {left}"


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""
