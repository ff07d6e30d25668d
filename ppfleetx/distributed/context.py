"""Where this process stands in the job: made once, passed on, never fetched from a global."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppfleetx.config.plan import ParallelPlan

DATA_AXES = ("dp", "sharding")
"""Axes whose ranks read different samples."""


@dataclass(frozen=True)
class ParallelContext:
    """One process's place in the plan.

    ``data_rank`` counts the replicas that read different samples (dp times sharding); processes that
    differ in other axes only read the same samples.

    Attributes:
        plan: the degrees.
        rank: number of this process in the job.
        data_rank: number of the replica, ``dp rank x sharding + sharding rank``.
        device: ``cpu`` or ``gpu``.
        groups: Paddle's process group of each axis with more than one rank.
    """

    plan: ParallelPlan = field(default_factory=ParallelPlan)
    rank: int = 0
    data_rank: int = 0
    device: str = "cpu"
    groups: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def single(cls, device: str = "cpu") -> ParallelContext:
        """The context of a process that is alone."""
        return cls(device=device)

    @classmethod
    def of(cls, plan: ParallelPlan, rank: int, device: str, groups: Mapping[str, Any]) -> ParallelContext:
        """The context of global rank ``rank`` of a job laid out by ``plan``."""
        return cls(plan, rank, plan.data_rank(rank), device, groups)

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return self.plan.world_size

    @property
    def data_size(self) -> int:
        """Number of replicas that read different samples."""
        return self.plan.data_size

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for the job."""
        return self.rank == 0

    @property
    def knows_loss(self) -> bool:
        """Whether this rank is the first of those that compute the loss."""
        return self.plan.knows_loss(self.rank)

    def rank_on(self, axis: str) -> int:
        """This process's rank along ``axis`` (dp, pp, sharding, sep or mp)."""
        return self.plan.coordinates(self.rank)[axis]

    def size_of(self, axis: str) -> int:
        """Degree of ``axis``."""
        return getattr(self.plan, axis)

    def group_of(self, axis: str) -> Any:
        """Process group of ``axis``, which must have more than one rank."""
        return self.groups[axis]

    def sum_over(self, axes: Iterable[str], *values: float) -> list[float]:
        """Sums of ``values`` over the ranks of ``axes``, in float64 and the same on each of them."""
        if all(axis not in self.groups for axis in axes):
            return list(values)
        from ppfleetx.distributed.transfer import read, upload

        return read(self.sum_tensor_over(axes, upload(np.array(values, np.float64)))).tolist()

    def sum_tensor_over(self, axes: Iterable[str], tensor: Any) -> Any:
        """``tensor``, of few numbers, summed over the ranks of ``axes``, one axis after the other."""
        from ppfleetx.distributed.collectives import sum_gathered

        for axis in axes:
            if axis in self.groups:
                tensor = sum_gathered(tensor, self.groups[axis])
        return tensor

    def max_tensor_over(self, axes: Iterable[str], tensor: Any) -> Any:
        """The largest of each element over the ranks of ``axes``, in place in ``tensor``."""
        from paddle import distributed

        for axis in axes:
            if axis in self.groups:
                distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX, group=self.groups[axis])
        return tensor

    def sum_over_data(self, value: float) -> float:
        """Sum of ``value`` over all data ranks."""
        return self.sum_over(DATA_AXES, value)[0]

    def sum_of_data_ranks(self, values: Sequence[float]) -> float:
        """:meth:`sum_over_data` of values that are known: ``values`` has one of every rank of the job."""
        of_data = {self.plan.data_rank(rank): value for rank, value in enumerate(values)}
        first = {data_rank % self.plan.sharding: 0.0 for data_rank in of_data}
        for data_rank in sorted(of_data):
            first[data_rank % self.plan.sharding] += of_data[data_rank]
        return sum(first.values())
