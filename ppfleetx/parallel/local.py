"""The micro-batch loop of plans without pipeline parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from ppfleetx.data.loader import MicroBatch
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.transfer import read
from ppfleetx.nn.loss_output import as_loss_output
from ppfleetx.parallel.grad_sync import GradientSync
from ppfleetx.parallel.step import StepOptions, StepRunner, to_tensors

if TYPE_CHECKING:
    from ppfleetx.models.module import BasicModule
    from ppfleetx.nn.stage import LayerFactory
    from ppfleetx.optims.optimizer import Optimizer


class LocalRunner(StepRunner):
    """Runs a model whose stages are all in this process. Parameters may be slices. ``sync`` is None for
    the only process of a job."""

    def __init__(
        self,
        model: paddle.nn.Layer,
        module: BasicModule,
        factory: LayerFactory,
        optimizer: Optimizer | None,
        ctx: ParallelContext,
        sync: GradientSync | None = None,
        options: StepOptions | None = None,
    ) -> None:
        sync = sync or GradientSync(model.parameters(), ctx)
        stages = list(enumerate(model.stages))
        super().__init__(model, stages, optimizer, ctx, sync, options or StepOptions(), module, factory)

    def _forward_backward(self, micro_batches: Sequence[MicroBatch], num_valid: float) -> None:
        for batch in micro_batches:
            (self._micro_loss(batch) / num_valid).backward()

    def _forward(self, micro_batches: Sequence[MicroBatch]) -> None:
        for batch in micro_batches:
            self._micro_loss(batch)

    def _micro_loss(self, micro_batch: MicroBatch) -> paddle.Tensor:
        batch = to_tensors(micro_batch)
        outputs = self._module.forward(self._model, batch)
        found = as_loss_output(self._module.loss(outputs, batch, self._factory), self._module)
        self._sums.add(found)
        return found.loss

    @paddle.no_grad()
    def compute(
        self,
        function: Callable[[Any, dict[str, paddle.Tensor]], paddle.Tensor],
        micro_batches: Sequence[MicroBatch],
    ) -> list[np.ndarray]:
        """``function(model, tensors)`` for each micro batch of this rank, in evaluation mode."""
        self.model.eval()
        self._scales.begin()
        with self._precision.autocast():
            return [read(function(self._model, to_tensors(batch))) for batch in micro_batches]
