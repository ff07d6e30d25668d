"""The CPU and the memory of this machine, as Linux describes them."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
AVX512 = frozenset({"avx512f", "avx512dq", "avx512bw", "avx512vl"})
_MEMINFO, _MAPS = Path("/proc/meminfo"), Path("/proc/self/maps")
_HUGE_PAGE = 2 << 20
_SMALLEST = _HUGE_PAGE // 8  # smaller blocks are not worth a huge page
_MADV_COLLAPSE = 25  # madvise(2), Linux 6.1: make huge pages now, whatever the system's default


def read_cpuinfo(path: Path = CPUINFO) -> str:
    """The description of the first CPUs; empty if there is none."""
    return path.read_text(errors="replace")[:16384] if path.exists() else ""


def flags_in(cpuinfo: str) -> frozenset[str]:
    """The instruction sets of the first CPU in a description, by the kernel's names."""
    return frozenset(cpuinfo.partition("flags")[2].partition("\n")[0].split())


def available_cpus() -> int:
    """CPUs this process may run on (its affinity, not the machine's total)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_fraction() -> float:
    """The share of the machine's memory that programs can still get; 1 if the system does not say."""
    kibibytes = _kibibytes()
    return kibibytes.get("MemAvailable", 1) / kibibytes.get("MemTotal", 1)


def available_bytes() -> int | None:
    """Bytes of memory that programs can still get; None if the system does not say."""
    kibibytes = _kibibytes().get("MemAvailable")
    return None if kibibytes is None else kibibytes << 10


def _kibibytes() -> dict[str, int]:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return {}
    return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}


def back_by_huge_pages(address: int, num_bytes: int) -> None:
    """Ask Linux to keep a block of memory that is read often in pages of 2 MiB.

    A core then reads matrices up to a fifth faster, and small ones up to a third. The pages at its ends are
    included if they belong to the process; a small block has no others. Nothing happens if the
    system cannot do it.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or not sys.platform.startswith("linux") or num_bytes < _SMALLEST:
        return
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    first, end = address // _HUGE_PAGE, -(-(address + num_bytes) // _HUGE_PAGE)
    for low, high in ((first, end), (first + 1, end - 1)):
        if low < high and madvise(low * _HUGE_PAGE, (high - low) * _HUGE_PAGE, _MADV_COLLAPSE) == 0:
            return


def back_process_by_huge_pages() -> None:
    """The same for all large blocks that this process has allocated."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return
    for addresses, permissions, _, _, inode, *name in map(str.split, lines):
        if permissions == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            back_by_huge_pages(start, end - start)
