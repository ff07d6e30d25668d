"""The ranks of a job as grids with named axes: one grid for dense parameters, one for experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache

from ppfleetx.config.parallel_plan import AXES, ParallelPlan


@dataclass(frozen=True)
class RankGrid:
    """One arrangement of a job's ranks as a grid with named axes, for dense parameters or for experts.

    Attributes:
        axes: all axes, from the outermost to the innermost. Consecutive ranks differ along the innermost.
        tensor: the axis of tensor parallelism.
        replicas: the axes over which gradients are summed.
        owners: the axis of ZeRO sharding.
    """

    axes: tuple[str, ...]
    tensor: str
    replicas: tuple[str, ...]
    owners: str


DENSE = RankGrid(AXES, tensor="mp", replicas=("dp", "sep"), owners="sharding")
EXPERTS = RankGrid(("edp", "pp", "ep", "emp"), tensor="emp", replicas=("edp", "ep"), owners="edp")
"""The grid for expert parameters. It arranges the ranks of each pipeline stage, in the same order, along
other axes."""
EXPERT_AXES = ("ep", "emp", "edp")
"""The axes that only the grid for expert parameters has."""

SUM_ORDER = ("mp", "emp", "dp", "sep", "edp", "ep", "pp")
"""The order of the axes over which gradients are summed."""

SMALL_MESSAGE = 2e6
"""Message size in bytes below which an exchange between nodes is faster in two levels. Two levels need fewer
messages between nodes, which take about 10 us each, but move the bytes once more within a node, at about 200
GB/s."""

Ranks = tuple[int, ...]


def levels_of(ranks: Sequence[int], per_node: int) -> tuple[list[Ranks], list[Ranks]] | None:
    """Split ``ranks`` into groups for a two-level collective: groups between nodes, and groups within a node.

    Returns (groups between nodes, groups within a node), or None if ``ranks`` cannot be divided into two
    levels. For example, with 4 ranks per node, the ranks 0, 1, 4, 5 have the groups (0, 4) and (1, 5) between
    nodes, and (0, 1) and (4, 5) within a node.

    Args:
        ranks: sorted global ranks. The ranks of the job must be numbered node by node.
        per_node: the number of the job's ranks on each node.
    """
    on_nodes = Counter(rank // per_node for rank in ranks)
    inside = len(ranks) // len(on_nodes)
    if len(on_nodes) == 1 or inside == 1 or set(on_nodes.values()) != {inside}:
        return None
    nodes = [tuple(ranks[first : first + inside]) for first in range(0, len(ranks), inside)]
    return list(zip(*nodes, strict=True)), nodes


def grid_of(axes: Collection[str]) -> RankGrid:
    """Return the grid that has all of ``axes``: :data:`DENSE` if possible, otherwise :data:`EXPERTS`.

    Raises:
        ValueError: neither grid has all of ``axes``.
    """
    for view in (DENSE, EXPERTS):
        if set(axes) <= set(view.axes):
            return view
    raise ValueError(f"no view of the ranks has the axes {', '.join(sorted(axes))}")


@dataclass(frozen=True)
class Mesh:
    """The ranks of a parallel plan as two grids: for dense parameters, and for experts.

    Raises:
        ValueError: ep x emp does not divide the number of ranks of a pipeline stage.
    """

    plan: ParallelPlan = field(default_factory=ParallelPlan)

    def __post_init__(self) -> None:
        ep, emp, size = self.plan.ep, self.plan.emp, self.plan.stage_size
        if size % (ep * emp):
            raise ValueError(f"the {size} ranks of a pipeline stage do not divide by ep {ep} x emp {emp}")

    def size_of(self, axis: str) -> int:
        if axis == "edp":
            return self.plan.stage_size // (self.plan.ep * self.plan.emp)
        return getattr(self.plan, axis)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of a global rank along each axis of both grids."""
        at = self.plan.coordinates(rank)
        within = 0
        for axis in (axis for axis in AXES if axis != "pp"):
            within = within * self.size_of(axis) + at[axis]
        for axis in ("emp", "ep", "edp"):
            within, at[axis] = divmod(within, self.size_of(axis))
        return at

    def groups_over(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All groups of global ranks that differ only along ``axes``.

        One of the two grids must have all of ``axes``.
        """
        return _groups_over(self, axes)

    def ranks_over(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks of the group over ``axes`` that ``rank`` belongs to."""
        return next(group for group in self.groups_over(axes) if rank in group)


@cache
def _groups_over(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    others = [axis for axis in grid_of(axes).axes if axis not in axes]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.plan.world_size):
        at = mesh.coordinates(rank)
        groups.setdefault(tuple(at[axis] for axis in others), []).append(rank)
    return tuple(map(tuple, groups.values()))
