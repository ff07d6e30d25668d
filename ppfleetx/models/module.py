"""The interface of a task: its stages, its outputs, its loss and its evaluation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import paddle

from ppfleetx.config.sections.root import RunConfig
from ppfleetx.data.loader import MicroBatch
from ppfleetx.nn.loss_output import LossOutput, as_loss_output
from ppfleetx.nn.stage import LayerFactory, Stage

if TYPE_CHECKING:
    from ppfleetx.distributed.context import ParallelContext

Tensors = dict[str, paddle.Tensor]
"""A micro batch on the device, by name."""


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


class BasicModule(ABC):
    """A task on a model, independent of how it is parallelised.

    A pipeline runs the stages itself and calls :meth:`loss` on the last one; a single process calls
    :meth:`forward` and then :meth:`loss`. These methods must not keep state between calls.

    Args:
        cfg: the run's configuration.
    """

    loss_in_pieces = False
    """Whether :meth:`loss` only passes ``outputs`` to the factory's ``token_loss`` or ``token_scores``.
    ``Model.loss_chunks`` needs this, because it makes them
    :class:`~ppfleetx.nn.chunked_loss.LogitsInPieces`."""

    metrics: tuple[str, ...] = ()
    """Names of all metrics that :meth:`loss` and the layers of the model report, the same on all ranks."""

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg = cfg

    def count(self, batch: MicroBatch) -> float:
        """Return this micro batch's share of the divisor of the step's loss.

        It is called on the host, before the first forward pass. The default is the number of tokens (for a
        classifier, examples) that count.
        """
        return float(batch["loss_mask"].sum(dtype=np.float64))

    @abstractmethod
    def stages(self, factory: LayerFactory) -> list[Stage]:
        """The model as named stages, first to last, with layers made by ``factory``."""

    def forward(self, model: Any, batch: Tensors) -> paddle.Tensor:
        """Return the last stage's output for a micro batch, ``[s, b, V]`` for a language model.

        Args:
            model: callable, ``model(tokens, position_ids=..., document_start=...)``.
            batch: ``tokens [b, s]``, and ``position_ids`` and ``document_start`` if the data has them.
        """
        return model(
            batch["tokens"],
            position_ids=batch.get("position_ids"),
            document_start=batch.get("document_start"),
        )

    @abstractmethod
    def loss(self, outputs: paddle.Tensor, batch: Tensors, factory: LayerFactory) -> LossOutput:
        """Return the loss of one micro batch, as a sum, with its metrics.

        Args:
            outputs: result of :meth:`forward`; depending on the plan, its columns may be sliced.
            batch: tensors of the micro batch.
            factory: the factory of the plan; its ``token_loss`` and ``token_scores`` know how logits are
                sliced.
        """

    def evaluator(self, ctx: ParallelContext, *, has_labels: bool = True) -> Evaluator:
        """Return a new evaluator for one evaluation.

        Args:
            ctx: this process's place.
            has_labels: False if the data has no labels, so that only outputs are needed.
        """
        return TokenLoss()


class WrappedTask(BasicModule):
    """A task that delegates to another one everything a subclass does not override.

    Args:
        task: the task to delegate to.
    """

    def __init__(self, task: BasicModule) -> None:
        super().__init__(task.cfg)
        self.task, self.metrics, self.loss_in_pieces = task, task.metrics, task.loss_in_pieces

    def count(self, batch: MicroBatch) -> float:
        return self.task.count(batch)

    def stages(self, factory: LayerFactory) -> list[Stage]:
        return self.task.stages(factory)

    def forward(self, model: Any, batch: Tensors) -> Any:
        return self.task.forward(model, batch)

    def loss(self, outputs: Any, batch: Tensors, factory: LayerFactory) -> LossOutput:
        return as_loss_output(self.task.loss(outputs, batch, factory), self.task)

    def evaluator(self, ctx: ParallelContext, *, has_labels: bool = True) -> Evaluator:
        return self.task.evaluator(ctx, has_labels=has_labels)
