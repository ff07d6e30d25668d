"""Find slow ranks by their *own time*: the part of a step in which a rank does not wait for other ranks. Each
rank is compared with the ranks of its pipeline stage. A rank that is alone in its stage is compared with the
ranks of the other stages, and counts as slow only if its own time is at least 1.5 times theirs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

LEAST_COST = 0.05
"""A slow rank is reported if it costs at least this fraction of a step."""
_UNLIKE = 1.5  # factor allowed in comparisons with other stages, which may have less work


@dataclass(frozen=True)
class SlowRank:
    """A slow rank, with mean times in seconds per step. *Own time* is the part of a step in which a rank does
    not wait for other ranks.

    Attributes:
        data: the part of the rank's own time in which it waited for training data.
        compute: the rest of the rank's own time.
        usual: median own time of the ranks with which the rank is compared; for an even number of ranks, the
            lower of the two middle values.
        alone: whether the rank is alone in its pipeline stage, and is compared with other stages.
    """

    rank: int
    host: str
    data: float
    compute: float
    usual: float
    alone: bool = False

    def __str__(self) -> str:
        usual = (
            f"other pipeline stages take {self.usual:.3f} s in total, and may have less work"
            if self.alone
            else f"usually {self.usual:.3f} s in total"
        )
        return (
            f"rank {self.rank} on {self.host} (data {self.data:.3f} s, computing {self.compute:.3f} s a "
            f"step; {usual})"
        )


@dataclass(frozen=True)
class Stragglers:
    """The slow ranks found in the ``steps`` steps up to and including step ``step``. A rank's *own time* is
    the part of a step in which it does not wait for other ranks.

    Attributes:
        step_seconds: mean time of a step, on the rank where it is longest.
        cost: estimated fraction of ``step_seconds`` that the job would save if no rank were slow. It is
            computed from the largest difference between the own time of a slow rank and the usual own time.
        slowest: the slow ranks, those with the longest own time first.
    """

    step: int
    steps: int
    step_seconds: float
    cost: float
    slowest: tuple[SlowRank, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        first = "; ".join(map(str, self.slowest[:3]))
        more = f"; and {len(self.slowest) - 3} more" if len(self.slowest) > 3 else ""
        return f"slow ranks cost {self.cost:.0%} of the last {self.steps} steps: {first}{more}"


class StragglerTable:
    """Adds up the times of all ranks in each period of ``every`` steps, and then finds the slow ranks.

    Attributes:
        own: times of this rank's last step in microseconds: total, waiting for training data, waiting for
            other ranks. The caller sends them to the other ranks.
        found: the slow ranks, if :meth:`add` has just found any.
    """

    def __init__(self, every: int, stages: Sequence[int], gather: Callable[[str], list[str]]) -> None:
        self._every, self._stages, self._gather = every if len(stages) > 1 else 0, stages, gather
        self.own = [0, 0, 0]
        self._sums = np.zeros([len(stages), 3], np.int64)
        self._steps = 0
        self._hosts: list[str] = []
        self.found: Stragglers | None = None

    def took(self, total: float, data: float, waited: float) -> None:
        """Record the seconds of this rank's last step: total, waiting for data, waiting for other ranks."""
        self.own = [int(1e6 * seconds) for seconds in (total, data, waited)]

    def add(self, times: np.ndarray, step: int) -> None:
        """Add the times of one step. At the end of each period of ``every`` steps, find the slow ranks. All
        ranks must call this.

        ``times`` is int64 ``[rank, 3]`` and has the :attr:`own` times of each rank. If slow ranks are found,
        :attr:`found` has them; otherwise, it is None.
        """
        self.found = None
        if not self._every or not times.any():
            return
        if not self._hosts:
            self._hosts = self._gather(socket.gethostname())
        self._sums += times
        self._steps += 1
        if self._steps == self._every:
            self.found = find_stragglers(
                self._sums / (1e6 * self._steps), self._stages, self._hosts, step, self._steps
            )
            self._sums[:] = 0
            self._steps = 0


def find_stragglers(
    times: np.ndarray, stages: Sequence[int], hosts: Sequence[str], step: int, steps: int
) -> Stragglers | None:
    """Return the slow ranks, or None if no rank is slow.

    Args:
        times: mean seconds per step ``[rank, 3]``: in total, waiting for training data, waiting for other
            ranks.
        stages: pipeline stage of each rank.
        hosts: name of each rank's machine.
        step, steps: the last step, and the number of steps measured.
    """
    total, data, waited = times.T
    own = np.maximum(total - waited, data)
    alone = [list(stages).count(stage) == 1 and len(stages) > 1 for stage in stages]
    like = [
        np.not_equal(stages, stage) if one else np.equal(stages, stage)
        for stage, one in zip(stages, alone, strict=True)
    ]
    usual = np.array([np.percentile(own[ranks], 50, method="lower") for ranks in like])
    seconds = float(total.max())
    excess = np.where(own >= np.where(alone, _UNLIKE, 1.0) * usual, own - usual, 0.0)
    cost = float(excess.max()) / max(seconds, 1e-9)
    if cost <= LEAST_COST:
        return None
    slow = [rank for rank in np.argsort(-own, kind="stable").tolist() if excess[rank] > LEAST_COST * seconds]
    slowest = [
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
    return Stragglers(step, steps, seconds, cost, tuple(slowest))
