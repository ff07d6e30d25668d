"""Every rank runs all stages: the micro-batch loop in plain sight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from ppfleetx.distributed.context import ParallelContext
from ppfleetx.parallel.grad_sync import GradientSync
from ppfleetx.parallel.precision import Precision
from ppfleetx.parallel.runner import MicroBatch
from ppfleetx.parallel.step import StepRunner, to_tensors

if TYPE_CHECKING:
    from ppfleetx.optims.adamw import Optimizer
    from ppfleetx.parallel.apply import LossFunction


class LocalRunner(StepRunner):
    """Runs a model whose stages are all in this process (their parameters may be slices).

    Args:
        model: callable container of the stages, a ``paddle.nn.Layer``.
        loss_fn: ``(model, micro batch of tensors) -> (loss sum, number of valid tokens)``.
        optimizer: None for a runner that only evaluates.
        ctx: this process's place.
        sync: sums and clips gradients; None: those of a process that is alone.
        seed: ``Global.seed``, for the dropout streams.
        clip_norm: global gradient norm to clip to; 0 measures it only.
        precision: what is computed in which type; None: all in float32.
    """

    def __init__(
        self,
        model: paddle.nn.Layer,
        loss_fn: LossFunction,
        optimizer: Optimizer | None,
        ctx: ParallelContext,
        sync: GradientSync | None = None,
        *,
        seed: int,
        clip_norm: float,
        precision: Precision | None = None,
    ) -> None:
        sync = sync or GradientSync(model.parameters(), ctx)
        stages = list(enumerate(model.stages))
        more = {"seed": seed, "clip_norm": clip_norm, "precision": precision}
        super().__init__(model, stages, optimizer, ctx, sync, **more)
        self._loss_fn = loss_fn

    def _forward_backward(self, micro_batches: Sequence[MicroBatch], num_valid: float) -> float:
        losses = []
        for batch in micro_batches:
            micro_loss, _ = self._loss_fn(self.model, to_tensors(batch))
            (micro_loss / num_valid).backward()
            losses.append(micro_loss.detach())
        return sum(micro.item() for micro in losses)

    def _forward(self, micro_batches: Sequence[MicroBatch]) -> float:
        return sum(self._loss_fn(self.model, to_tensors(batch))[0].item() for batch in micro_batches)

    @paddle.no_grad()
    def compute(
        self,
        function: Callable[[Any, dict[str, paddle.Tensor]], paddle.Tensor],
        micro_batches: Sequence[MicroBatch],
    ) -> list[np.ndarray]:
        self.model.eval()
        with self._precision.autocast():
            return [function(self.model, to_tensors(batch)).numpy() for batch in micro_batches]
