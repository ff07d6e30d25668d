"""Evaluators, which compute and accumulate results over the batches of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from ppfleetx.data.loader import MicroBatch


class Metric(NamedTuple):
    """A metric of a step or an evaluation: a sum over all micro batches and ranks, and its count."""

    total: float
    count: float

    @property
    def mean(self) -> float:
        return self.total / self.count


class EvalOutput(NamedTuple):
    """The result of one evaluation batch over the whole job.

    Attributes:
        loss: sum of the loss over all tokens or examples that count.
        count: their number.
        metrics: the task's metrics, by name.
    """

    loss: float
    count: float
    metrics: Mapping[str, Metric]


@dataclass(frozen=True)
class Measured:
    """The result of an evaluation, the same on all ranks.

    Attributes:
        loss: mean loss over the tokens or examples that count.
        count: number of tokens or examples that count.
        ppl: perplexity of a language model; None for a classifier.
        metrics: the task's metrics, by name.
        outputs: outputs of a classifier, ``[examples, outputs]`` in the order of the file.
    """

    loss: float
    count: float
    ppl: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    outputs: np.ndarray | None = None


class Evaluator(Protocol):
    """Accumulates the results of one evaluation. All ranks of a job call its methods together."""

    def add(self, runner: Any, micro_batches: Sequence[MicroBatch]) -> None:
        """Add one batch; ``runner`` is a :class:`~ppfleetx.parallel.step.StepRunner`."""

    def result(self) -> Measured | None:
        """Return the result over all batches; None if nothing counted."""


class TokenLoss:
    def __init__(self) -> None:
        self._loss_sum = self._count = 0.0
        self._metrics: dict[str, Metric] = {}

    def add(self, runner: Any, micro_batches: Sequence[MicroBatch]) -> None:
        """Evaluate a global batch and add its loss."""
        found = runner.eval_step(micro_batches)
        self._loss_sum, self._count = self._loss_sum + found.loss, self._count + found.count
        for name, (total, count) in found.metrics.items():
            before = self._metrics.get(name, Metric(0.0, 0.0))
            self._metrics[name] = Metric(before.total + total, before.count + count)

    def result(self) -> Measured | None:
        """Return the mean over all batches; None if no token counted."""
        if self._count == 0:
            return None
        loss = self._loss_sum / self._count
        metrics = {name: metric.mean for name, metric in self._metrics.items()}
        return Measured(loss, self._count, ppl=perplexity(loss), metrics=metrics)


def perplexity(loss: float) -> float:
    """``exp(loss)``; infinity if a float cannot hold it, NaN for NaN."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
