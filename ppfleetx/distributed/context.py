"""The position of a process in the job. Created once and passed as an argument, not kept in a global."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from ppfleetx.config.mesh import Mesh, levels_of
from ppfleetx.config.plan import ParallelPlan
from ppfleetx.resilience.flight_recorder import RECORD

DATA_AXES = ("dp", "sharding")
"""Axes whose ranks read different samples."""

LEVELS = ("between nodes", "within nodes")
"""The two levels of a hierarchical all-to-all, in the order in which rows are sent."""


@dataclass(frozen=True)
class ParallelContext:
    """A process's position in the plan, and Paddle's process group of each axis with more than one rank.

    ``data_rank`` is ``dp rank x sharding + sharding rank``, the number of the data-parallel replica.
    Processes that differ only in other axes read the same samples.
    """

    plan: ParallelPlan = field(default_factory=ParallelPlan)
    rank: int = 0
    data_rank: int = 0
    device: str = "cpu"
    groups: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of all ranks, with one view for dense parameters and one for experts."""
        return Mesh(self.plan)

    @classmethod
    def single(cls, device: str = "cpu") -> ParallelContext:
        return cls(device=device)

    @classmethod
    def of(cls, plan: ParallelPlan, rank: int, device: str, groups: Mapping[str, Any]) -> ParallelContext:
        return cls(plan, rank, plan.data_rank(rank), device, groups)

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    @property
    def data_size(self) -> int:
        """The number of data ranks, which read different samples."""
        return self.plan.data_size

    @property
    def is_main(self) -> bool:
        """Whether this rank logs and writes for the whole job."""
        return self.rank == 0

    @property
    def knows_loss(self) -> bool:
        """Whether this is the first of the ranks that compute the loss."""
        return self.plan.knows_loss(self.rank)

    def rank_on(self, axis: str) -> int:
        """Return this process's rank along ``axis``, an axis of the plan or an expert axis."""
        return self.mesh.coordinates(self.rank)[axis]

    def size_of(self, axis: str) -> int:
        return self.mesh.size_of(axis)

    def group_of(self, axis: str) -> Any:
        """Return the process group of ``axis``, which must have more than one rank."""
        return self.groups[axis]

    def group_over(self, axes: tuple[str, ...]) -> Any:
        """Return the process group of the ranks that differ along ``axes``, or None if this rank is the only
        one.

        Groups of several axes, and of expert axes, must have been created by :meth:`with_groups`. The
        exception is dp with sep, for which fleet has a group.
        """
        axes = tuple(axis for axis in axes if self.size_of(axis) > 1)
        if not axes:
            return None
        if axes == ("dp", "sep"):
            from paddle.distributed import fleet

            return fleet.get_hybrid_communicate_group().get_dp_sep_parallel_group()
        return self.groups["+".join(axes)]

    def with_groups(self, needed: Iterable[tuple[str, ...]]) -> ParallelContext:
        """Return a copy of this context with a process group for each of ``needed``. A collective: all ranks
        must call it with the same ``needed``."""
        groups = dict(self.groups)
        for axes in needed:
            axes = tuple(axis for axis in axes if self.size_of(axis) > 1)
            name = "+".join(axes)
            if not axes or axes == ("dp", "sep") or name in groups:
                continue
            groups[name] = self._new_group(name, self.mesh.groups_over(axes))
        return self if groups == self.groups else replace(self, groups=groups)

    def with_levels(self, axis: str, per_node: int) -> ParallelContext:
        """Return a copy of this context with the groups of ``axis`` for a hierarchical all-to-all, if its
        ranks are on several nodes (:func:`~ppfleetx.config.mesh.levels_of`). A collective, like
        :meth:`with_groups`.

        Args:
            per_node: ranks on each node.
        """
        split = [levels_of(ranks, per_node) for ranks in self.mesh.groups_over((axis,))]
        if None in split:
            return self
        names = [f"{axis} {level}" for level in LEVELS]
        made = {
            name: self._new_group(name, chain.from_iterable(lists))
            for name, lists in zip(names, zip(*split, strict=True), strict=True)
        }
        return replace(self, groups={**self.groups, **made})

    def levels_of(self, axis: str) -> tuple[Any, Any] | None:
        """Return the groups that :meth:`with_levels` created for ``axis``, or None if there are none."""
        between, within = (self.groups.get(f"{axis} {level}") for level in LEVELS)
        return None if between is None else (between, within)

    def _new_group(self, name: str, lists: Iterable[Sequence[int]]) -> Any:
        """Create a process group for each of ``lists``, and return the group that contains this rank."""
        from paddle import distributed

        made = [distributed.new_group(list(ranks)) for ranks in lists]
        mine = next(group for group in made if self.rank in group.ranks)
        RECORD.names = {**RECORD.names, mine.id: name}
        return mine

    def sum_over(self, axes: Iterable[str], *values: float) -> list[float]:
        """Sum ``values`` over the ranks of ``axes`` in float64. All these ranks get the same result."""
        if all(axis not in self.groups for axis in axes):
            return list(values)
        from ppfleetx.distributed.transfer import read, upload

        return read(self.sum_tensor_over(axes, upload(np.array(values, np.float64)))).tolist()

    def sum_tensor_over(self, axes: Iterable[str], tensor: Any) -> Any:
        """Sum a small ``tensor`` over the ranks of ``axes``, one axis after the other."""
        from ppfleetx.distributed.collectives import sum_gathered

        for axis in axes:
            if axis in self.groups:
                tensor = sum_gathered(tensor, self.groups[axis])
        return tensor

    def max_tensor_over(self, axes: Iterable[str], tensor: Any) -> Any:
        """Take the elementwise maximum of ``tensor`` over the ranks of ``axes``, in place."""
        from paddle import distributed

        for axis in axes:
            if axis in self.groups:
                distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX, group=self.groups[axis])
        return tensor

    def sum_of_data_ranks(self, values: Sequence[float]) -> float:
        """Sum over the data ranks without communication. ``values`` has one entry per rank of the job."""
        of_data = {self.plan.data_rank(rank): value for rank, value in enumerate(values)}
        first = {data_rank % self.plan.sharding: 0.0 for data_rank in of_data}
        for data_rank in sorted(of_data):
            first[data_rank % self.plan.sharding] += of_data[data_rank]
        return sum(first.values())
