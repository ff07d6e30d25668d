"""The interface of a task: its stages, its outputs and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from ppfleetx.config.sections.root import RunConfig
from ppfleetx.data.loader import MicroBatch
from ppfleetx.models.evaluator import Evaluator, TokenLoss
from ppfleetx.nn.loss_output import LossOutput, as_loss_output
from ppfleetx.nn.stage import LayerFactory, Stage

if TYPE_CHECKING:
    from ppfleetx.distributed.context import ParallelContext

Tensors = dict[str, paddle.Tensor]
"""A micro batch on the device, by name."""


class BasicModule(ABC):
    """A task on a model, independent of how it is parallelized.

    A pipeline runs the stages itself and calls :meth:`loss` on the last one; a single process calls
    :meth:`forward` and then :meth:`loss`. These methods must not keep state between calls.
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
        """Return a new evaluator for one evaluation. Without ``has_labels``, only outputs are needed."""
        return TokenLoss()


class WrappedTask(BasicModule):
    """A task that delegates to ``task`` everything a subclass does not override."""

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
