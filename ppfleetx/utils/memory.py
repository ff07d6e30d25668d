"""Memory of the machine."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_MEMINFO, _MAPS = Path("/proc/meminfo"), Path("/proc/self/maps")
_HUGE_PAGE = 2 << 20
_SMALLEST = _HUGE_PAGE // 8  # block whose surroundings are worth a huge page
_MADV_COLLAPSE = 25  # madvise(2), Linux 6.1: make huge pages of what is there, whatever the system's default


def available_fraction() -> float:
    """Share of the machine's memory that programs can still get; 1 where the system does not tell."""
    kibibytes = _kibibytes()
    return kibibytes.get("MemAvailable", 1) / kibibytes.get("MemTotal", 1)


def available_bytes() -> int | None:
    """Memory that programs can still get; None where the system does not tell."""
    kibibytes = _kibibytes().get("MemAvailable")
    return None if kibibytes is None else kibibytes << 10


def _kibibytes() -> dict[str, int]:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return {}
    return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}


def back_by_huge_pages(address: int, num_bytes: int) -> None:
    """Ask Linux to keep a block of memory that is read again and again in pages of 2 MiB.

    A core reads matrices up to a fifth faster then, and small ones up to a third. The pages at the block's
    ends are taken along where they belong to the process; a small block has no others. Nothing happens where
    the system cannot or will not do it.
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
    """The same for all large blocks this process has allocated, whoever holds them by now."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return
    for addresses, permissions, _, _, inode, *name in map(str.split, lines):
        if permissions == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            back_by_huge_pages(start, end - start)
