"""A process's position in the parallel job: its rank, its coordinates along the parallel axes, and its
process groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from ppfleetx.config.mesh import Mesh, levels_of
from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.resilience.flight_recorder import RECORD

DATA_AXES = ("dp", "sharding")
"""Axes whose ranks read different samples."""

LEVELS = ("between nodes", "within nodes")
"""The two levels of a hierarchical all-to-all, in the order in which rows are sent."""


@dataclass(frozen=True)
class ParallelContext:
    """This process's rank and coordinates in the parallel plan, and its process group along each axis that
    has more than one rank."""

    plan: ParallelPlan = field(default_factory=ParallelPlan)
    rank: int = 0
    device: str = "cpu"
    groups: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def mesh(self) -> Mesh:
        """The job's two device meshes: one for dense layers, and one for experts."""
        return Mesh(self.plan)

    @classmethod
    def single(cls, device: str = "cpu") -> ParallelContext:
        return cls(device=device)

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    @cached_property
    def data_rank(self) -> int:
        """The number of this rank's data-parallel replica: dp rank x sharding degree + sharding rank."""
        return self.plan.data_rank(self.rank)

    @property
    def data_size(self) -> int:
        """The number of data-parallel replicas: dp degree x sharding degree."""
        return self.plan.data_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs and writes files for the whole job."""
        return self.rank == 0

    @property
    def reports_loss(self) -> bool:
        """Whether this rank reports the loss. Only the first rank of the last pipeline stage does."""
        return self.plan.reports_loss(self.rank)

    def rank_on(self, axis: str) -> int:
        """Return this process's rank along ``axis``, such as ``dp`` or, for experts, ``ep``."""
        return self.mesh.coordinates(self.rank)[axis]

    def size_of(self, axis: str) -> int:
        return self.mesh.size_of(axis)

    def group_of(self, axis: str) -> Any:
        """Return this rank's process group along ``axis``. Raises KeyError if the axis has only one rank."""
        return self.groups[axis]

    def group_over(self, axes: tuple[str, ...]) -> Any:
        """Return the process group over ``axes``: the ranks whose coordinates along all other axes are the
        same as this rank's. Returns None if this rank is the only one. The group must have been created by
        fleet or by :meth:`with_groups`."""
        axes = tuple(axis for axis in axes if self.size_of(axis) > 1)
        if not axes:
            return None
        if axes == ("dp", "sep"):
            from paddle.distributed import fleet

            return fleet.get_hybrid_communicate_group().get_dp_sep_parallel_group()
        return self.groups["+".join(axes)]

    def with_groups(self, needed: Iterable[tuple[str, ...]]) -> ParallelContext:
        """Return a copy of this context with process groups over the combinations of axes in ``needed``, such
        as ``("dp", "mp")``. All ranks must call this with the same ``needed``."""
        groups = dict(self.groups)
        for axes in needed:
            axes = tuple(axis for axis in axes if self.size_of(axis) > 1)
            name = "+".join(axes)
            if not axes or axes == ("dp", "sep") or name in groups:
                continue
            groups[name] = self._new_group(name, self.mesh.groups_over(axes))
        return self if groups == self.groups else replace(self, groups=groups)

    def with_levels(self, axis: str, per_node: int) -> ParallelContext:
        """Return a copy of this context with the process groups for a two-level all-to-all along ``axis``.
        Its first level is between nodes, its second within a node of ``per_node`` ranks. Returns this context
        unchanged if the ranks along ``axis`` cannot be divided into two levels, for example because they are
        all on one node. All ranks must call this."""
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
        """Return this rank's two groups for a two-level all-to-all along ``axis``: (between nodes, within its
        node). Returns None if :meth:`with_levels` has not created them."""
        between, within = (self.groups.get(f"{axis} {level}") for level in LEVELS)
        return None if between is None else (between, within)

    def _new_group(self, name: str, lists: Iterable[Sequence[int]]) -> Any:
        """Create a process group for each list of ranks in ``lists``, and return the group that contains this
        rank. Hang reports call that group ``name``."""
        from paddle import distributed

        made = [distributed.new_group(list(ranks)) for ranks in lists]
        mine = next(group for group in made if self.rank in group.ranks)
        RECORD.names = {**RECORD.names, mine.id: name}
        return mine

    def sum_over(self, axes: Iterable[str], *values: float) -> list[float]:
        """Sum each number in ``values`` over the ranks along ``axes``, in float64, and return the sums. All
        these ranks get bitwise equal sums. The sum runs over one axis after another, so it needs no group
        from :meth:`with_groups` for the combination of axes."""
        if all(axis not in self.groups for axis in axes):
            return list(values)
        from ppfleetx.distributed.host_device_copy import read, upload

        return read(self.sum_tensor_over(axes, upload(np.array(values, np.float64)))).tolist()

    def sum_tensor_over(self, axes: Iterable[str], tensor: Any) -> Any:
        """Return the elementwise sum of a small ``tensor`` over the ranks along ``axes``. The sum runs over
        one axis after another."""
        from ppfleetx.distributed.collectives import sum_gathered

        for axis in axes:
            if axis in self.groups:
                tensor = sum_gathered(tensor, self.groups[axis])
        return tensor

    def max_tensor_over(self, axes: Iterable[str], tensor: Any) -> Any:
        """Replace ``tensor``, in place, by its elementwise maximum over the ranks along ``axes``, one axis
        after another. Returns ``tensor``."""
        from paddle import distributed

        for axis in axes:
            if axis in self.groups:
                distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX, group=self.groups[axis])
        return tensor

    def sum_of_data_ranks(self, values: Sequence[float]) -> float:
        """Return the sum of ``values`` over the data-parallel replicas, without communication. ``values`` has
        one entry per rank. All ranks of a replica have the same entry, which counts only once."""
        of_data = {self.plan.data_rank(rank): value for rank, value in enumerate(values)}
        first = {data_rank % self.plan.sharding: 0.0 for data_rank in of_data}
        for data_rank in sorted(of_data):
            first[data_rank % self.plan.sharding] += of_data[data_rank]
        return sum(first.values())
