"""The lines of the start-up block that need the built model: how many parameters each rank holds."""

from __future__ import annotations

from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.together import gather
from ppfleetx.parallel.runner import Runner

_MAX_RANKS_SHOWN = 16


def rank_table(ctx: ParallelContext, runner: Runner) -> list[str]:
    """A line for each rank: its coordinates in the plan and the parameters it holds; every rank calls this.

    Ranks that hold equally much and differ along dp, sharding and sep only are not repeated.
    """
    held = sum(parameter.size for _, parameter in runner.named_parameters())
    counts = gather(ctx, held)
    if ctx.world_size == 1:
        return []
    lines: dict[str, list[int]] = {}
    for rank, count in enumerate(counts):
        at = ctx.plan.coordinates(rank)
        place = ", ".join(f"{axis} {at[axis]}" for axis in ("pp", "mp") if ctx.size_of(axis) > 1)
        lines.setdefault(f"{count:,} parameters" + (f" ({place})" if place else ""), []).append(rank)
    shown = [f"{_ranks(ranks):<14} {text}" for text, ranks in list(lines.items())[:_MAX_RANKS_SHOWN]]
    return shown + (["..."] if len(lines) > len(shown) else [])


def offload_notes(ctx: ParallelContext) -> list[str]:
    """A line for a run that keeps its states in host memory where all memory is the host's."""
    if not ctx.plan.sharding_offload or ctx.device != "cpu":
        return []
    return ["offload saves nothing on a CPU: host memory is all there is, and the states are there anyway"]


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
