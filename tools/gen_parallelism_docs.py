#!/usr/bin/env python3
"""Write the computed parts of docs/parallelism.md: legal plans, conditions, and pictures of schedules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from ppfleetx.config.parallel_plan import ParallelPlan, enumerate_plans, violations, zero_bubble_order
from ppfleetx.config.parallel_plan import Pass as ZeroBubblePass
from ppfleetx.utils.exit_codes import run_tool
from tools.site.pages import filled_page, write_files

TOOL = "tools/gen_parallelism_docs.py"

# Each kind of parallelism as the change it makes to a plan.
_KINDS = {
    "dp": {"dp": 2},
    "mp": {"mp": 2},
    "sequence parallel": {"mp": 2, "sequence_parallel": True},
    "pp": {"pp": 2},
    "virtual stages": {"pp": 2, "virtual_pp_degree": 2},
    "zero bubble": {"pp": 2, "pp_schedule": "zb_h1"},
    "sharding 1": {"sharding": 2, "sharding_stage": 1},
    "sharding 2": {"sharding": 2, "sharding_stage": 2},
    "sharding 3": {"sharding": 2, "sharding_stage": 3},
    "sep": {"sep": 2},
}


def blocks() -> dict[str, str]:
    """Return the text of each generated block, by name."""
    return {
        "legal combinations": legal_combinations(),
        "schedules": "\n\n".join(
            [
                _picture("1F1B, 4 stages, 8 micro batches", 4, 1, 8),
                _zero_bubble_picture(4, 8),
                _picture("Interleaved, 4 stages of 2 chunks, 8 micro batches", 4, 2, 8),
            ]
        ),
    }


def legal_combinations() -> str:
    """Return a table of the pairs of kinds that can be combined, the number of legal plans, and the reasons
    against the other pairs."""
    lines = [_row(["", *_KINDS]), _row(["---"] * (len(_KINDS) + 1))]
    refused: dict[frozenset[str], str] = {}
    for one, change in _KINDS.items():
        cells = []
        for other, further in _KINDS.items():
            plan = _combined(change, further)
            if plan is None:
                cells.append("")
            elif found := violations(plan):
                refused.setdefault(frozenset((one, other)), f"- {one} with {other}: {found[0].rule}.")
                cells.append("no")
            else:
                cells.append("yes")
        lines.append(_row([f"**{one}**", *cells]))
    counts = {n: sum(not plan.sharding_offload for plan in enumerate_plans(n)) for n in (2, 4, 8)}
    numbers = ", ".join(f"{count} for {size} processes" for size, count in counts.items())
    lines += [
        "",
        f"Legal plans of all axes: {numbers}; with sharding 2 or 3 also with offload. Not legal:",
        "",
    ]
    return "\n".join([*lines, *refused.values()])


def _combined(change: dict, further: dict) -> ParallelPlan | None:
    """Apply both changes to one plan; None if they set the same field to different values."""
    if any(further.get(key, value) != value for key, value in change.items()):
        return None
    return replace(ParallelPlan(), **change, **{k: v for k, v in further.items() if k not in change})


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


# -- schedules --------------------------------------------------------------------------------

Pass = tuple[str, int, int]
"""(``F`` or ``B``, chunk of the model, micro batch)."""


def order_of_passes(stages: int, chunks: int, micro_batches: int, rank: int) -> list[Pass]:
    """Return the passes of one pipeline rank in the order of execution: 1F1B, or interleaved 1F1B if
    ``chunks`` > 1 (Narayanan et al., 2021, sections 2.2 and 2.3)."""
    total = chunks * micro_batches
    later = stages - rank - 1
    warm_up = later if chunks == 1 else 2 * later + (chunks - 1) * stages
    forward = list(_interleaved(stages, chunks, micro_batches, rank))
    backward = [(chunks - 1 - part, micro) for part, micro in _parts(stages, chunks, micro_batches)]
    backward = [(part * stages + rank, micro) for part, micro in backward]
    passes: list[Pass] = [("F", *work) for work in forward[: min(warm_up, total)]]
    for number in range(warm_up, total):
        passes += [("F", *forward[number]), ("B", *backward[number - warm_up])]
    return passes + [("B", *work) for work in backward[max(0, total - warm_up) :]]


def _parts(stages: int, chunks: int, micro_batches: int) -> Iterator[tuple[int, int]]:
    """Yield (chunk of the rank, micro batch) in the order of forward passes. With several chunks, each chunk
    processes ``stages`` micro batches before the next chunk."""
    group = stages if chunks > 1 else micro_batches
    for first in range(0, micro_batches, group):
        for part in range(chunks):
            for micro in range(first, min(first + group, micro_batches)):
                yield part, micro


def _interleaved(stages: int, chunks: int, micro_batches: int, rank: int) -> Iterator[tuple[int, int]]:
    for part, micro in _parts(stages, chunks, micro_batches):
        yield part * stages + rank, micro


def timetable(stages: int, chunks: int, micro_batches: int) -> list[list[tuple[int, Pass]]]:
    """Return (start, pass) of all passes of each rank. A forward pass of a chunk takes 1 unit of time, and a
    backward pass 2."""
    last = stages * chunks - 1
    orders = [order_of_passes(stages, chunks, micro_batches, rank) for rank in range(stages)]
    ends: dict[Pass, int] = {}
    free, done = [0] * stages, [0] * stages
    table: list[list[tuple[int, Pass]]] = [[] for _ in range(stages)]
    while any(done[rank] < len(orders[rank]) for rank in range(stages)):
        moved = False
        for rank in range(stages):
            if done[rank] == len(orders[rank]):
                continue
            kind, chunk, micro = work = orders[rank][done[rank]]
            needs = _needed(kind, chunk, micro, last)
            if any(need not in ends for need in needs):
                continue
            start = max([free[rank], *(ends[need] for need in needs)])
            free[rank] = ends[work] = start + (1 if kind == "F" else 2)
            table[rank].append((start, work))
            done[rank] += 1
            moved = True
        assert moved, "the schedule waits for itself"
    return table


def _needed(kind: str, chunk: int, micro: int, last: int) -> list[Pass]:
    if kind == "F":
        return [("F", chunk - 1, micro)] if chunk else []
    return [("F", chunk, micro), *([("B", chunk + 1, micro)] if chunk < last else [])]


def _picture(title: str, stages: int, chunks: int, micro_batches: int) -> str:
    """Draw a schedule as text, with one line per rank and one column per unit of time. The page explains the
    symbols."""
    table = timetable(stages, chunks, micro_batches)
    length = max(start + (1 if work[0] == "F" else 2) for row in table for start, work in row)
    lines = []
    for rank, row in enumerate(table):
        cells = ["."] * length
        for start, (kind, chunk, micro) in row:
            first = "1" if chunk < stages else "A"
            symbol = chr(ord(first) + micro)
            if kind == "F":
                cells[start] = symbol
            else:
                cells[start : start + 2] = symbol.lower(), "-"
        lines.append(f"rank {rank}  {''.join(cells)}")
    idle = 1 - 3 * chunks * micro_batches / length
    return f"{title}: {idle:.0%} idle\n\n```text\n" + "\n".join(lines) + "\n```"


def _zero_bubble_picture(stages: int, micro_batches: int) -> str:
    """Draw the ZB-H1 schedule as text, with one line per rank and one column per unit of time. F is shown as
    the micro batch's number, B as ``-``, and W as the micro batch's letter."""
    rows = zero_bubble_timetable(stages, micro_batches)
    length = max(start + 1 for row in rows for start, _ in row)
    lines = []
    for stage, row in enumerate(rows):
        cells = ["."] * length
        for start, (part, micro) in row:
            cells[start] = {"F": str(micro + 1), "B": "-", "W": chr(ord("a") + micro)}[part]
        lines.append(f"rank {stage}  {''.join(cells)}")
    idle = 1 - 3 * micro_batches / length
    title = f"ZB-H1, {stages} stages, {micro_batches} micro batches (B is `-`, W a small letter)"
    return f"{title}: {idle:.0%} idle\n\n```text\n" + "\n".join(lines) + "\n```"


def zero_bubble_timetable(stages: int, micro_batches: int) -> list[list[tuple[int, ZeroBubblePass]]]:
    """Return (start, pass) of all passes of each rank in ZB-H1. F, B and W each take 1 unit of time."""
    orders = [zero_bubble_order(stage, stages, micro_batches) for stage in range(stages)]
    ends: dict[tuple[str, int, int], int] = {}
    table: list[list[tuple[int, ZeroBubblePass]]] = [[] for _ in range(stages)]
    while any(len(row) < len(order) for row, order in zip(table, orders, strict=True)):
        for stage, (row, order) in enumerate(zip(table, orders, strict=True)):
            while len(row) < len(order):
                part, micro = work = order[len(row)]
                before = {"F": stage - 1, "B": stage + 1}.get(part, stage)
                needs = (part, before, micro)
                is_edge = part == "W" or not 0 <= before < stages
                if not is_edge and needs not in ends:
                    break
                start = max(row[-1][0] + 1 if row else 0, 0 if is_edge else ends[needs])
                ends[part, stage, micro] = start + 1
                row.append((start, work))
    return table


def main() -> int:
    """Write the page, or check it."""
    return write_files(lambda: filled_page("parallelism.md", blocks(), TOOL), __doc__)


if __name__ == "__main__":
    run_tool(main)
