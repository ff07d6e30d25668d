"""What the kernel says about processes: whether they run, what they use, who was killed (Linux only)."""

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
    """Why a process of this machine is silent; "" if it just runs.

    Args:
        pid: its number.
        born: its :func:`birth_of`, because another process may have the number by now.
    """
    if not Path("/proc/self/stat").exists():
        return ""
    fields = _stat(pid)
    if not fields or abs(float(fields[19]) - born) > 1:
        return "has ended"
    return _STATES.get(fields[0], "")


def birth_of(pid: int) -> float:
    """When a process began, in clock ticks since the machine booted; 0: unknown."""
    fields = _stat(pid)
    return float(fields[19]) if fields else 0.0


def _stat(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def machine() -> str:
    """An identifier of this machine and container."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def killed_for_memory() -> int:
    """How many processes the kernel has killed since boot because memory ran out."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return 0


def memory() -> dict[str, int]:
    """Bytes of memory: of this process now and at its peak, and available on the machine."""
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
    """How long the main thread was ready and waited for a core."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


class WorkMeter:
    """Measures whether this process computes, or moves bytes to or from files.

    Args:
        watching: seconds of computing so far that do not count, because they went into watching.
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
        """Since the last call: whether the process used ``share`` of a core (or was ready to), and whether it
        moved ``size`` bytes a second."""
        before, self._seen = self._seen, self._now()
        seconds, computed, moved = (now - then for now, then in zip(self._seen, before, strict=True))
        return seconds > 0 and computed / seconds >= share, seconds > 0 and moved / seconds >= size
