"""Read from Linux the state of this machine and its processes: CPU, memory, activity, network interfaces."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
AVX512 = frozenset({"avx512f", "avx512dq", "avx512bw", "avx512vl"})
BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16"})
"""CPU flags of instructions that multiply bfloat16 numbers and accumulate in float32. Either one is
enough."""
_MEMINFO = Path("/proc/meminfo")
_HUGE_PAGE = 2 << 20
_SMALLEST = _HUGE_PAGE // 8  # bytes; smaller blocks are not worth a huge page
_MADV_COLLAPSE = 25  # madvise(2), Linux 6.1: make huge pages now, whatever the system's default


def read_cpuinfo(path: Path = CPUINFO) -> str:
    """Return the first 16 KiB of ``/proc/cpuinfo``, or "" if the file does not exist."""
    return path.read_text(errors="replace")[:16384] if path.exists() else ""


def flags_in(cpuinfo: str) -> frozenset[str]:
    """Return the feature flags of the first CPU in the text of ``/proc/cpuinfo``, such as ``avx2``."""
    return frozenset(cpuinfo.partition("flags")[2].partition("\n")[0].split())


def available_cpus() -> int:
    """Return the number of CPUs on which this process may run, according to its CPU affinity."""
    return len(os.sched_getaffinity(0))


def available_fraction() -> float:
    """Return the fraction of the machine's memory that is available, from 0 to 1; 1 if unknown."""
    kibibytes = _read_numbers(_MEMINFO)
    return kibibytes.get("MemAvailable", 1) / kibibytes.get("MemTotal", 1)


def available_bytes() -> int | None:
    kibibytes = _read_numbers(_MEMINFO).get("MemAvailable")
    return None if kibibytes is None else kibibytes << 10


def _read_numbers(path: Path) -> dict[str, int]:
    """Return the numbers in a file of ``/proc`` with lines such as ``MemTotal: 16384 kB``, by name. Returns
    an empty dictionary if the file cannot be read."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {word[0].rstrip(":"): int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}


def back_by_huge_pages(address: int, num_bytes: int) -> None:
    """Ask Linux to use huge pages of 2 MiB for a block of memory, so that reading large matrices is faster.
    Does nothing if the system cannot do that, or for a block smaller than 256 KiB."""
    if num_bytes < _SMALLEST:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    first, end = address // _HUGE_PAGE, -(-(address + num_bytes) // _HUGE_PAGE)
    # First include the huge pages that the block covers only partly. This fails unless the process owns all
    # of their memory.
    for low, high in ((first, end), (first + 1, end - 1)):
        if low < high and madvise(low * _HUGE_PAGE, (high - low) * _HUGE_PAGE, _MADV_COLLAPSE) == 0:
            return


def back_process_by_huge_pages() -> None:
    """Ask Linux to use huge pages for all large blocks of memory that this process has allocated
    (:func:`back_by_huge_pages`)."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    for addresses, permissions, _, _, inode, *name in map(str.split, lines):
        if permissions == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            back_by_huge_pages(start, end - start)


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface. Raises OSError if there is no such interface or it has
    no address."""
    get_address = 0x8915  # SIOCGIFADDR, linux/sockios.h
    return socket.inet_ntoa(_ask_interface(name, get_address)[4:8])


def interface_flags(name: str) -> int:
    """Return the flags of a network interface (linux/if.h). Raises OSError if there is no such interface."""
    get_flags = 0x8913  # SIOCGIFFLAGS, linux/sockios.h
    return int.from_bytes(_ask_interface(name, get_flags)[:2], sys.byteorder)


def _ask_interface(name: str, request: int) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))[16:]


_STATES = {
    "T": "is stopped (SIGSTOP or Ctrl-Z)",
    "t": "is stopped by a debugger",
    "D": "is held by the kernel, as a rule in a read or a write of a disk or a file server",
    "Z": "has ended",
    "X": "has ended",
}


def state_of(pid: int, born: float) -> str:
    """Return why a process on this machine does not respond, such as "is stopped by a debugger"; "" if it
    runs normally. ``born`` is its start time, from :func:`birth_of`."""
    fields = _stat(pid)
    # With another start time, it is another process with the same id.
    if not fields or abs(float(fields[19]) - born) > 1:
        return "has ended"
    return _STATES.get(fields[0], "")


def birth_of(pid: int) -> float:
    """Return the start time of a process, in clock ticks since the machine booted; 0 if it cannot be read."""
    fields = _stat(pid)
    return float(fields[19]) if fields else 0.0


def _stat(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def machine_id() -> str:
    """Return an identifier of this machine and container; "" if it is unknown. Processes with the same
    identifier can look up each other's process ids."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def killed_for_memory() -> int:
    return _read_numbers(Path("/proc/vmstat")).get("oom_kill", 0)


def memory() -> dict[str, int]:
    kibibytes = _read_numbers(Path("/proc/self/status")) | _read_numbers(_MEMINFO)
    names = {"resident": "VmRSS", "peak": "VmHWM", "machine_available": "MemAvailable"}
    return {ours: kibibytes[name] << 10 for ours, name in names.items() if name in kibibytes}


def _queued_seconds() -> float:
    """Return the number of seconds in which the main thread was ready to run but waited for a free core."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


class WorkMeter:
    """Measures how busy this process keeps the CPU, and how much it reads and writes. ``watching`` is a
    function that returns the CPU seconds to leave out, such as those of the thread that measures."""

    def __init__(self, watching: Callable[[], float] = float) -> None:
        self._watching = watching
        self._seen = self._now()

    def _now(self) -> tuple[float, float, int]:
        io = _read_numbers(Path("/proc/self/io"))
        moved = io.get("rchar", 0) + io.get("wchar", 0)
        return time.monotonic(), time.process_time() - self._watching() + _queued_seconds(), moved

    def look(self, *, share: float, size: int) -> tuple[bool, bool]:
        """Return (is busy, moves data) for the time since the last call. The process is busy if it used at
        least the fraction ``share`` of a core; waiting for a free core counts as use. It moves data if it
        read and wrote, in total, at least ``size`` bytes per second."""
        before, self._seen = self._seen, self._now()
        seconds, computed, moved = (now - then for now, then in zip(self._seen, before, strict=True))
        return seconds > 0 and computed / seconds >= share, seconds > 0 and moved / seconds >= size
