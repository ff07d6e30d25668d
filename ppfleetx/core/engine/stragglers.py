"""Which ranks hold the others up: each rank's own time a step, compared with the others'.

Ranks that train together take equally long for a step, because the fast ones wait for the slow ones. What
tells them apart is the time that a rank does *not* wait for others: its own. A job whose slowest rank has an
own time of 1.3 s, and the others of 1.0 s, loses 0.3 s a step. The stages of a pipeline have different work,
so a rank is compared with those of its own stage; one that is alone in its stage, with those of the others,
and it is slow only when it takes half as long again.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.together import gather

LEAST_COST = 0.05
"""Share of the step's time from which a slow rank is worth a line."""
_UNLIKE = 1.5  # so many times what other stages take a stage may take because it has more work


@dataclass(frozen=True)
class SlowRank:
    """A rank that takes longer than most; seconds a step.

    Attributes:
        data, compute: waiting for data, and the rest of its own time.
        usual: own time of the median rank; of two, the faster one's.
        alone: it is the only one of its pipeline stage, and is compared with other stages.
    """

    rank: int
    host: str
    data: float
    compute: float
    usual: float
    alone: bool = False

    def __str__(self) -> str:
        usual = (
            f"other pipeline stages take {self.usual:.3f} s together, and may have less work"
            if self.alone
            else f"usual are {self.usual:.3f} s together"
        )
        return (
            f"rank {self.rank} on {self.host} (data {self.data:.3f} s, computing {self.compute:.3f} s a "
            f"step; {usual})"
        )


@dataclass(frozen=True)
class Stragglers:
    """The ranks that held a job up over the last steps.

    Attributes:
        step: the last of the steps.
        steps: how many they were.
        step_seconds: mean time of one.
        cost: share of it that would be saved if the slowest ranks were like the median one.
        slowest: the slow ranks, slowest first.
    """

    step: int
    steps: int
    step_seconds: float
    cost: float
    slowest: tuple[SlowRank, ...]

    def to_json(self) -> dict[str, Any]:
        """For ``metrics.jsonl``."""
        return asdict(self)

    def __str__(self) -> str:
        told = "; ".join(map(str, self.slowest[:3]))
        more = f"; and {len(self.slowest) - 3} more" if len(self.slowest) > 3 else ""
        return f"slow ranks cost {self.cost:.0%} of the last {self.steps} steps: {told}{more}"


class StragglerTable:
    """Sums the ranks' times over so many steps.

    Args:
        ctx: this process's place.
        every: steps between two looks; 0: none is had.
    """

    def __init__(self, ctx: ParallelContext, every: int) -> None:
        self._ctx, self._every = ctx, every if ctx.world_size > 1 else 0
        self._own = [0, 0, 0]
        self._sums = np.zeros([ctx.world_size, 3], np.int64)
        self._steps = 0
        self._hosts: list[str] = []
        self.found: Stragglers | None = None

    def took(self, total: float, data: float, waited: float) -> None:
        """This rank's last step took ``total`` seconds, of which it waited for data and for other ranks."""
        self._own = [int(1e6 * seconds) for seconds in (total, data, waited)]

    @property
    def own(self) -> list[int]:
        """What the other ranks are told: microseconds of the last step, as of :meth:`took`."""
        return self._own

    def add(self, times: np.ndarray, step: int) -> None:
        """Take in what all ranks have told, int64 ``[rank, 3]``, after ``step`` steps; all ranks call this.

        :attr:`found` is then what a look has found, on all ranks; None where none was due or nobody is slow.
        """
        self.found = None
        if not self._every or not times.any():
            return
        if not self._hosts:
            self._hosts = gather(self._ctx, socket.gethostname())
        self._sums += times
        self._steps += 1
        if self._steps == self._every:
            stages = [self._ctx.plan.coordinates(rank)["pp"] for rank in range(self._ctx.world_size)]
            self.found = judged(self._sums / (1e6 * self._steps), stages, self._hosts, step, self._steps)
            self._sums[:] = 0
            self._steps = 0


def judged(
    times: np.ndarray, stages: Sequence[int], hosts: Sequence[str], step: int, steps: int
) -> Stragglers | None:
    """The slow ranks among those whose mean times ``[rank, (total, data, waited)]`` are given in seconds.

    Args:
        stages: of the pipeline, by rank.
    """
    total, data, waited = times.T
    own = np.maximum(total - waited, data)
    alone = [list(stages).count(stage) == 1 and len(stages) > 1 for stage in stages]
    like = [
        np.not_equal(stages, stage) if one else np.equal(stages, stage)
        for stage, one in zip(stages, alone, strict=True)
    ]
    usual = np.array([_median(own[ranks]) for ranks in like])
    seconds = float(total.max())
    excess = np.where(own >= np.where(alone, _UNLIKE, 1.0) * usual, own - usual, 0.0)
    cost = float(excess.max()) / max(seconds, 1e-9)
    if cost <= LEAST_COST:
        return None
    slow = [rank for rank in np.argsort(-own, kind="stable").tolist() if excess[rank] > LEAST_COST * seconds]
    told = [
        SlowRank(
            rank,
            hosts[rank],
            float(data[rank]),
            float(own[rank] - data[rank]),
            float(usual[rank]),
            alone[rank],
        )
        for rank in slow
    ]
    return Stragglers(step, steps, seconds, cost, tuple(told))


def _median(values: np.ndarray) -> float:
    return float(np.percentile(values, 50, method="lower"))
