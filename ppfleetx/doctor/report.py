"""Format rows as a table for people, or as JSON for programs."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ppfleetx.config.counts import counted, ranks_text
from ppfleetx.doctor.check import Row, Status

GROUPS = (
    "nodes",
    "processes",
    "environment",
    "configuration",
    "files",
    "storage",
    "network",
    "agreement",
    "operators",
    "losses",
    "card",
    "collectives",
)
"""The headings, in the order of the report."""
_WIDEST, _NARROWEST = 160, 60
_MARGIN = 8  # width of the status column


def exit_code(rows: Iterable[Row]) -> int:
    return int(any(row.status is Status.FAIL for row in rows))


def joined(rows_of_ranks: Sequence[Sequence[Row]]) -> list[Row]:
    """Merge the rows of all ranks, sorted by group; equal rows become one.

    A row names no ranks if all ranks have it. A row that is not a failure also names no ranks if all ranks
    that ran the check have it.
    """
    ranks: dict[tuple[Any, ...], list[int]] = {}
    first: dict[tuple[Any, ...], Row] = {}
    for rank, rows in enumerate(rows_of_ranks):
        for row in rows:
            key = (row.group, row.name, row.status, row.found, row.fix)
            first.setdefault(key, row)
            ranks.setdefault(key, []).append(rank)
    looked: dict[tuple[str, str], set[int]] = {}
    for key, those in ranks.items():
        looked.setdefault(key[:2], set()).update(those)
    rows = []
    for key, row in first.items():
        well = row.status in (Status.OK, Status.SKIPPED)
        everyone = looked[key[:2]] if well else set(range(len(rows_of_ranks)))
        rows.append(replace(row, ranks=() if everyone == set(ranks[key]) else tuple(ranks[key])))
    return in_groups(rows)


def in_groups(rows: Sequence[Row]) -> list[Row]:
    """Sort rows by group, in the order of :data:`GROUPS`, and keep rows with the same name together."""
    groups = list(dict.fromkeys((*GROUPS, *(row.group for row in rows))))
    names = list(dict.fromkeys((row.group, row.name) for row in rows))
    return sorted(rows, key=lambda row: (groups.index(row.group), names.index((row.group, row.name))))


def as_json(rows: Sequence[Row], world_size: int) -> str:
    counts = {str(status): sum(row.status is status for row in rows) for status in Status}
    content = {
        "ok": exit_code(rows) == 0,
        "world_size": world_size,
        "counts": counts,
        "rows": [row.as_json() for row in rows],
    }
    return json.dumps(content, indent=2)


def as_table(rows: Sequence[Row]) -> str:
    """The report as a table: a heading for each group, then each row with its finding and fix."""
    width = min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size((110, 24)).columns))
    names = max((len(row.name) for row in rows), default=0)
    lines: list[str] = []
    for group, members in groupby(rows, key=lambda row: row.group):
        lines += ["", group]
        for row in members:
            lines += _lines(row, names, width)
    return "\n".join([*lines[1:], "", verdict(rows)])


def verdict(rows: Sequence[Row]) -> str:
    counts = {status: sum(row.status is status for row in rows) for status in Status}
    parts = [f"{counts[status]} {status}" for status in Status if counts[status]]
    failed = counts[Status.FAIL]
    head = f"{counted(failed, 'check')} failed" if failed else "ready"
    return f"{head}: {', '.join(parts)}"


def _lines(row: Row, names: int, width: int) -> list[str]:
    who = f" [{ranks_text(row.ranks)}]" if row.ranks else ""
    head = f"  {row.status:<{_MARGIN}}{row.name:<{names}}  "
    blank = " " * len(head)
    text = _wrapped(f"{row.found}{who}", head, blank, width)
    return text + (_wrapped(f"fix: {row.fix}", blank, blank + "      ", width) if row.fix else [])


def _wrapped(text: str, head: str, blank: str, width: int) -> list[str]:
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, width, initial_indent=head, subsequent_indent=blank, **options)
