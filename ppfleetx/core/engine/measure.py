"""What an evaluation computes and adds up over its batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ppfleetx.core.programs.perplexity import perplexity
from ppfleetx.data.loader import MicroBatch
from ppfleetx.data.tasks.glue_metrics import glue_metrics
from ppfleetx.distributed.together import gather
from ppfleetx.parallel.runner import Runner

if TYPE_CHECKING:
    from ppfleetx.core.module.finetune import GPTFinetuneModule
    from ppfleetx.distributed.context import ParallelContext


@dataclass(frozen=True)
class Measured:
    """Result of an evaluation, the same on all ranks.

    Attributes:
        loss: mean over what counts.
        count: tokens or examples that count.
        ppl: perplexity of a language model; None of a classifier.
        metrics: the task's own numbers, by name.
        outputs: of a classifier, ``[examples, outputs]`` in the order of the file.
    """

    loss: float
    count: float
    ppl: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    outputs: np.ndarray | None = None


class Measure(Protocol):
    """Made anew for each evaluation; all ranks of a job call its methods together."""

    def add(self, runner: Runner, micro_batches: Sequence[MicroBatch]) -> None:
        """Take one batch into account."""

    def result(self) -> Measured | None:
        """Of all batches; None when nothing counted."""


class TokenLoss:
    """Token-weighted mean of the loss."""

    def __init__(self) -> None:
        self._loss_sum = self._count = 0.0

    def add(self, runner: Runner, micro_batches: Sequence[MicroBatch]) -> None:
        """Evaluate a global batch and add its loss."""
        loss, count = runner.eval_step(micro_batches)
        self._loss_sum, self._count = self._loss_sum + loss, self._count + count

    def result(self) -> Measured | None:
        """The mean over all that was added; None if no token counted."""
        if self._count == 0:
            return None
        loss = self._loss_sum / self._count
        return Measured(loss, self._count, ppl=perplexity(loss))


class Classification:
    """Outputs for every example, gathered from the data ranks; loss and the task's metrics of all of them.

    Args:
        module: the task.
        ctx: this process's place.
        has_labels: without them there are outputs alone.
    """

    def __init__(self, module: GPTFinetuneModule, ctx: ParallelContext, *, has_labels: bool = True) -> None:
        self._module, self._ctx, self._has_labels = module, ctx, has_labels
        self._rows: list[list[float]] = []

    def add(self, runner: Runner, micro_batches: Sequence[MicroBatch]) -> None:
        """Compute a global batch and keep the outputs of its examples."""
        found = runner.compute(self._module.forward, micro_batches)
        if self._ctx.rank_on("mp"):
            return  # the first tensor-parallel rank has the same
        for batch, outputs in zip(micro_batches, found, strict=True):
            rows = np.column_stack([batch["sample_ids"], batch["labels"], outputs.astype(np.float64)])
            self._rows += rows[batch["loss_mask"] > 0].tolist()

    def result(self) -> Measured | None:
        """Loss and metrics over all data ranks; None if there were no examples."""
        rows = np.array([row for rank in gather(self._ctx, self._rows) for row in rank])
        if rows.size == 0:
            return None
        rows = rows[rows[:, 0].argsort()]
        assert (rows[:, 0] == np.arange(len(rows))).all(), "each example counts once"
        labels, outputs = rows[:, 1], rows[:, 2:]
        if not self._has_labels:
            return Measured(math.nan, len(rows), outputs=outputs)
        metrics = glue_metrics(self._module.task, outputs, labels)
        return Measured(mean_loss(outputs, labels), len(rows), metrics=metrics, outputs=outputs)


def mean_loss(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Mean cross entropy of ``outputs [n, classes]``, or mean squared error of ``[n, 1]``."""
    if outputs.shape[1] == 1:
        return float(np.square(outputs[:, 0] - labels).mean())
    shifted = outputs - outputs.max(axis=1, keepdims=True)
    chosen = shifted[np.arange(len(labels)), labels.astype(np.int64)]
    return float((np.log(np.exp(shifted).sum(axis=1)) - chosen).mean())
