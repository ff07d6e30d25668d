"""Where this process stands in the job: made once, passed on, never fetched from a global."""

from __future__ import annotations

from dataclasses import dataclass, field

from ppfleetx.config.plan import ParallelPlan


@dataclass(frozen=True)
class ParallelContext:
    """One process's place in the plan.

    ``data_rank`` counts the replicas that read different samples (dp times sharding); processes that
    differ in other axes only read the same samples.
    """

    plan: ParallelPlan = field(default_factory=ParallelPlan)
    rank: int = 0
    data_rank: int = 0
    device: str = "cpu"

    @classmethod
    def single(cls, device: str = "cpu") -> ParallelContext:
        """The context of a process that is alone."""
        return cls(device=device)

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    @property
    def data_size(self) -> int:
        """Number of replicas that read different samples."""
        return self.plan.data_size

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for the job."""
        return self.rank == 0

    def sum_over_data(self, value: float) -> float:
        """Sum of ``value`` over all data ranks."""
        assert self.data_size == 1, "contexts of several data ranks bring their own reduction"
        return value
