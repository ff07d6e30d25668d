"""What this machine's CPU can do, as Linux lists it."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
AVX512 = frozenset({"avx512f", "avx512dq", "avx512bw", "avx512vl"})


def read_cpuinfo(path: Path = CPUINFO) -> str:
    """The description of the first CPUs, empty where there is none."""
    return path.read_text(errors="replace")[:16384] if path.exists() else ""


def flags_in(cpuinfo: str) -> frozenset[str]:
    """The instructions that the first CPU of a description has, by the kernel's names."""
    return frozenset(cpuinfo.partition("flags")[2].partition("\n")[0].split())
