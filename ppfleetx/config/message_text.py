"""Counts, sizes and ranks in messages: `1 process`, `3 corpora`, `1.5 GiB`, `ranks 0-2, 5`."""

from __future__ import annotations

from collections.abc import Iterable

_IRREGULAR = {"corpus": "corpora", "epoch": "epochs"}


def counted(count: int, noun: str, spec: str = "") -> str:
    """Write a number with its noun, in the plural where needed: ``1 process``, ``3 corpora``.

    ``noun`` is in the singular. ``spec`` is the format specification of the number, such as ``,``.
    """
    *before, last = noun.split(" ")
    if count != 1:
        last = _IRREGULAR.get(last) or last + ("es" if last.endswith(("s", "x", "ch", "sh")) else "s")
    return " ".join([f"{count:{spec}}", *before, last])


def bytes_text(num_bytes: float) -> str:
    """Write a number of bytes as ``1.5 GiB``, ``2.0 MiB``, ``3.0 KiB`` or ``64 B``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes:.0f} B"


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Group numbers into runs (first, last) of consecutive ones: 0, 1, 2, 5 gives ``[(0, 2), (5, 5)]``."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def ranks_text(ranks: Iterable[int]) -> str:
    """Write ranks as ``rank 3``, ``ranks 0, 1`` or ``ranks 0-2, 5``."""
    runs = runs_of(ranks)
    shown = [f"{a}-{b}" if b > a + 1 else ", ".join(map(str, range(a, b + 1))) for a, b in runs]
    return f"rank{'' if len(runs) == 1 and runs[0][0] == runs[0][1] else 's'} {', '.join(shown)}"
