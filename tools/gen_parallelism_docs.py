#!/usr/bin/env python3
"""Write the computed parts of docs/parallelism.md: legal plans, conditions, and pictures of schedules."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from ppfleetx.config.parallel_plan import ParallelPlan, enumerate_plans, violations
from ppfleetx.planner.timeline import Messages, Span, Timeline, simulate
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
                _picture(
                    "ZB-H1, 4 stages, 8 micro batches (B is `-`, W a small letter)", 4, 1, 8, zero_bubble=True
                ),
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


def schedule(stages: int, chunks: int, micro_batches: int, *, zero_bubble: bool = False) -> Timeline:
    """Simulate a schedule in which the forward pass of a chunk takes 1 unit of time, and the backward pass 2.
    With ``zero_bubble``, each half of the backward pass takes 1."""
    forward, backward = [[1.0] * chunks] * stages, [[2.0] * chunks] * stages
    weights = [1.0] * stages if zero_bubble else None
    return simulate(forward, backward, micro_batches, Messages(0.0), whole=True, weights=weights)


def _picture(title: str, stages: int, chunks: int, micro_batches: int, *, zero_bubble: bool = False) -> str:
    """Draw a schedule as text, with one line per rank and one column per unit of time. The page explains the
    symbols."""
    timeline = schedule(stages, chunks, micro_batches, zero_bubble=zero_bubble)
    rows = [["."] * round(timeline.seconds) for _ in range(stages)]
    for span in timeline.spans:
        rows[span.stage][round(span.start) : round(span.end)] = _symbols(span, zero_bubble)
    lines = [f"rank {rank}  {''.join(row)}" for rank, row in enumerate(rows)]
    idle = 1 - 3 * chunks * micro_batches / timeline.seconds
    return f"{title}: {idle:.0%} idle\n\n```text\n" + "\n".join(lines) + "\n```"


def _symbols(span: Span, zero_bubble: bool) -> str:
    """Return the symbols of a pass, one for each unit of time that it takes."""
    if span.is_weights:
        return chr(ord("a") + span.micro)
    symbol = chr(ord("A" if span.chunk else "1") + span.micro)
    if span.is_forward:
        return symbol
    return "-" if zero_bubble else f"{symbol.lower()}-"


if __name__ == "__main__":
    write_files(lambda: filled_page("parallelism.md", blocks(), TOOL), __doc__)
