"""What the kernel knows of processes: whether they run, what they use, who was killed (Linux alone)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

_STATES = {
    "T": "is stopped (SIGSTOP or Ctrl-Z)",
    "t": "is stopped by a debugger",
    "D": "is held by the kernel, as a rule in a read or a write of a disk or a file server",
    "Z": "has ended",
    "X": "has ended",
}


def state_of(pid: int, born: float) -> str:
    """What a process of this machine is doing that explains its silence, for people; "" when it just runs.

    Args:
        pid: its number.
        born: when it began, as :func:`birth_of` told: another process may have the number by now.
    """
    if not Path("/proc/self/stat").exists():
        return ""
    fields = _stat(pid)
    if not fields or abs(float(fields[19]) - born) > 1:
        return "has ended"
    return _STATES.get(fields[0], "")


def birth_of(pid: int) -> float:
    """When a process began, in clock ticks since the machine did; 0 where that is not known."""
    fields = _stat(pid)
    return float(fields[19]) if fields else 0.0


def _stat(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def machine() -> str:
    """What two processes on the same machine, and in the same container, have in common."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def killed_for_memory() -> int:
    """Processes that this machine's kernel has killed since its start because memory ran out."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return 0


def memory() -> dict[str, int]:
    """Bytes of memory that this process has and had at most, and that the machine has left."""
    found: dict[str, int] = {}
    for path, names in (
        ("/proc/self/status", {"VmRSS": "resident", "VmHWM": "peak"}),
        ("/proc/meminfo", {"MemAvailable": "machine_available"}),
    ):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(path).read_text().splitlines():
                name, _, value = line.partition(":")
                if name in names:
                    found[names[name]] = int(value.split()[0]) << 10
    return found


def _queued_seconds() -> float:
    """How long the main thread could have run, and had to wait for a core."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


class Activity:
    """Whether this process works: computes, or moves bytes to or from files.

    Args:
        watching: seconds of computing so far that went into watching, and do not count.
    """

    def __init__(self, watching: Callable[[], float] = float) -> None:
        self._watching = watching
        self._seen = self._now()

    def _now(self) -> tuple[float, float, int]:
        moved = 0
        with contextlib.suppress(OSError, ValueError):
            for line in Path("/proc/self/io").read_text().splitlines():
                name, _, number = line.partition(":")
                moved += int(number) if name in ("rchar", "wchar") else 0
        return time.monotonic(), time.process_time() - self._watching() + _queued_seconds(), moved

    def look(self, *, share: float, size: int) -> tuple[bool, bool]:
        """Since the last call: whether it has used ``share`` of a core's time, or would have if one had been
        free; and whether it has moved ``size`` bytes a second."""
        before, self._seen = self._seen, self._now()
        seconds, computed, moved = (now - then for now, then in zip(self._seen, before, strict=True))
        return seconds > 0 and computed / seconds >= share, seconds > 0 and moved / seconds >= size
