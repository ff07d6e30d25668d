"""Evaluators, which run an evaluation batch by batch and accumulate the results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from ppfleetx.data.dataloader import MicroBatch


class Metric(NamedTuple):
    """The sum and count of a metric over all micro batches and ranks. Its mean is ``total / count``."""

    total: float
    count: float

    @property
    def mean(self) -> float:
        return self.total / self.count


class EvalOutput(NamedTuple):
    """The loss and metrics of one evaluation batch, summed over all ranks.

    Attributes:
        loss: sum of the loss over the tokens (for a classifier, examples) that the loss mask keeps.
        count: number of these tokens or examples.
    """

    loss: float
    count: float
    metrics: Mapping[str, Metric]


@dataclass(frozen=True)
class Measured:
    """The result of an evaluation, the same on all ranks.

    Attributes:
        loss: mean loss over the tokens (for a classifier, examples) that the loss mask keeps; NaN if examples
            have no labels.
        count: number of these tokens or examples.
        ppl: perplexity of a language model; None for a classifier.
        metrics: means of the task's metrics, by name.
        outputs: outputs of a classifier, ``[examples, outputs]``, in the order of the data file.
    """

    loss: float
    count: float
    ppl: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    outputs: np.ndarray | None = None


class Evaluator(Protocol):
    """Accumulates the results of one evaluation. Every method is collective: all ranks of the job must call
    it."""

    def add(self, runner: Any, micro_batches: Sequence[MicroBatch]) -> None:
        """Evaluate one batch with ``runner``, a :class:`~ppfleetx.parallel.step_runner.StepRunner`, and add
        its loss and metrics."""

    def result(self) -> Measured | None:
        """Return the result over all batches; None if the loss mask excluded every token or example."""


class TokenLoss:
    def __init__(self) -> None:
        self._loss_sum = self._count = 0.0
        self._metrics: dict[str, Metric] = {}

    def add(self, runner: Any, micro_batches: Sequence[MicroBatch]) -> None:
        """Evaluate this rank's micro batches of one global batch, and add their loss and metrics over all
        ranks."""
        found = runner.eval_step(micro_batches)
        self._loss_sum, self._count = self._loss_sum + found.loss, self._count + found.count
        for name, (total, count) in found.metrics.items():
            before = self._metrics.get(name, Metric(0.0, 0.0))
            self._metrics[name] = Metric(before.total + total, before.count + count)

    def result(self) -> Measured | None:
        """Return the mean over all batches; None if the loss mask excluded every token."""
        if self._count == 0:
            return None
        loss = self._loss_sum / self._count
        metrics = {name: metric.mean for name, metric in self._metrics.items()}
        return Measured(loss, self._count, ppl=perplexity(loss), metrics=metrics)


def perplexity(loss: float) -> float:
    """Return ``exp(loss)``; infinity if the result overflows a float, NaN if ``loss`` is NaN."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
