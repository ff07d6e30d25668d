"""The interface of tasks. A task defines a model's stages, forward pass, loss and evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from ppfleetx.config.sections.root import RunConfig
from ppfleetx.data.dataloader import MicroBatch
from ppfleetx.models.evaluator import Evaluator, TokenLoss
from ppfleetx.nn.loss_output import LossOutput, as_loss_output
from ppfleetx.nn.stage import LayerFactory, Stage

if TYPE_CHECKING:
    from ppfleetx.distributed.context import ParallelContext

Tensors = dict[str, paddle.Tensor]
"""The tensors of a micro batch on the device, by name."""


class BasicModule(ABC):
    """Base class of tasks, such as pretraining or classification. A task defines the stages of a model, its
    loss and its evaluation, independent of the parallel plan. The methods must not keep state between calls.
    Under pipeline parallelism, :meth:`forward` is not called, because the pipeline runs the stages itself."""

    loss_in_chunks = False
    """Whether :meth:`loss` only passes ``outputs`` to the factory's ``token_loss`` or ``token_scores``.
    ``Model.loss_chunks`` greater than 1 requires this, because ``outputs`` are then
    :class:`~ppfleetx.nn.chunked_loss.DeferredLogits` instead of a tensor."""

    metrics: tuple[str, ...] = ()
    """Names of the metrics that :meth:`loss` reports, the same on all ranks. Metrics of the model's layers
    must be declared here or by the architecture."""

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg = cfg

    def count(self, batch: MicroBatch) -> float:
        """Return how many tokens (for a classifier, examples) of a micro batch contribute to the loss. The
        loss of a step is divided by the sum of these numbers over the job. ``batch`` is in host memory."""
        return float(batch["loss_mask"].sum(dtype=np.float64))

    @abstractmethod
    def stages(self, factory: LayerFactory) -> list[Stage]:
        """Return the model's stages, first to last. A stage holds the class and the arguments of one layer.
        One of the arguments is usually ``factory``, which makes linears, norms and embeddings."""

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
        """Return the loss of one micro batch, as a sum over tokens or examples, and its metrics.

        Args:
            outputs: result of :meth:`forward`; under tensor parallelism, this rank's columns of the logits.
            batch: tensors of the micro batch.
            factory: the layer factory, whose ``token_loss`` and ``token_scores`` handle sliced logits.
        """

    def evaluator(self, ctx: ParallelContext, *, has_labels: bool = True) -> Evaluator:
        """Create the evaluator for one evaluation. ``has_labels`` is False if the examples of a classifier
        have no labels; the evaluator then computes outputs, but no loss."""
        return TokenLoss()


class WrappedTask(BasicModule):
    """Base class of tasks that wrap another task, ``task``. By default, every method calls the same method of
    ``task``."""

    def __init__(self, task: BasicModule) -> None:
        super().__init__(task.cfg)
        self.task, self.metrics, self.loss_in_chunks = task, task.metrics, task.loss_in_chunks

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
