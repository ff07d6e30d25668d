"""A whole run: days, card-hours, cost, what failures take, a batch that grows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ppfleetx.models.gpt.spec import parameter_count
from ppfleetx.planner.case import Case
from ppfleetx.planner.network import Cluster
from ppfleetx.planner.prediction import Prediction
from ppfleetx.planner.step_time import step_time

_DAY, _HOUR = 86_400.0, 3_600.0


@dataclass(frozen=True)
class RunLength:
    """How long a run of ``tokens`` takes: steps, days, card-hours."""

    tokens: float
    steps: float
    days: float
    card_hours: float

    def cost(self, per_hour: float) -> tuple[float, float]:
        """(of the run, of a million tokens) at a price per card-hour."""
        whole = self.card_hours * per_hour
        return whole, whole / self.tokens * 1e6


def run_length(prediction: Prediction, tokens: float) -> RunLength:
    """The run of ``tokens`` with the step of ``prediction``."""
    steps = tokens / prediction.case.tokens
    seconds = steps * prediction.time.seconds
    cards = prediction.case.plan.world_size
    return RunLength(tokens, steps, seconds / _DAY, seconds / _HOUR * cards)


@dataclass(frozen=True)
class Failures:
    """What failures and checkpoints take of a run.

    Attributes:
        mtbf: seconds between two failures of the job.
        save: seconds that a checkpoint holds the job up.
        interval: the best seconds of work between two checkpoints.
        steps: the same in steps.
        lost: share of the time that checkpoints, repeated work and restarts take.
    """

    mtbf: float
    save: float
    interval: float
    steps: int
    lost: float


def failures(prediction: Prediction, *, node_mtbf: float, save: float, restart: float) -> Failures:
    """The best checkpoint interval (Young 1974, refined by Daly 2006, equation 37) and what it costs.

    Args:
        prediction: the step.
        node_mtbf: seconds between two failures of one node; a job stops with its first node.
        save: seconds that a checkpoint holds the job up.
        restart: seconds from a failure to the first step after it.
    """
    nodes = max(1.0, prediction.case.plan.world_size / prediction.cluster.per_node)
    mtbf = node_mtbf / nodes
    interval = _daly(save, mtbf)
    lost = save / (interval + save) + (interval + save) / (2 * mtbf) + restart / mtbf
    steps = max(1, round(interval / prediction.time.seconds))
    return Failures(mtbf, save, interval, steps, min(1.0, lost))


def _daly(save: float, mtbf: float) -> float:
    if save >= 2 * mtbf:
        return mtbf
    half = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(half) / 3 + half / 9) - save


def checkpoint_bytes(case: Case) -> float:
    """Parameters or their masters, and optimizer states."""
    each = max(case.precision.master_bytes, case.precision.parameter_bytes) + 4 * case.moments
    return parameter_count(case.model) * each


@dataclass(frozen=True)
class Ramp:
    """A batch that grows (Megatron-LM's ``--rampup-batch-size``): from ``start`` by ``increment`` until the
    whole batch is reached after ``samples`` sequences."""

    start: int
    increment: int
    samples: int


def ramp_seconds(case: Case, cluster: Cluster, ramp: Ramp) -> tuple[float, float]:
    """(seconds of the ramp's sequences, the same with the whole batch from the start).

    Raises:
        ValueError: a batch of the ramp cannot be dealt out.
    """
    per_pass = case.plan.data_size * case.micro_batch
    sizes = list(range(ramp.start, case.global_batch, ramp.increment))
    wrong = next((size for size in (*sizes, ramp.increment) if size % per_pass), None)
    if wrong is not None or not sizes:
        raise ValueError(
            f"a ramp has batches below {case.global_batch} that are multiples of data ranks x micro batch = "
            f"{per_pass}" + ("" if wrong is None else f", not {wrong}")
        )
    each = ramp.samples / len(sizes)
    seconds = 0.0
    for size in sizes:
        seconds += each / size * step_time(replace(case, accumulate=size // per_pass), cluster).seconds
    return seconds, ramp.samples / case.global_batch * step_time(case, cluster).seconds
