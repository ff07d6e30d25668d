"""One process holds the whole model: the micro-batch loop in plain sight."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.random import seed_step
from ppfleetx.optims.grad_clip import clip_by_global_norm
from ppfleetx.parallel.runner import MicroBatch, NonFiniteError, StepOutput

if TYPE_CHECKING:
    from ppfleetx.optims.adamw import NamedOptimizer
    from ppfleetx.parallel.apply import LossFunction


class LocalRunner:
    """Runs forward, backward and update of a model that lives in this process.

    Args:
        model: callable container of the stages, a ``paddle.nn.Layer``.
        loss_fn: ``(model, micro batch of tensors) -> (loss sum, number of valid tokens)``.
        optimizer: None for a runner that only evaluates.
        ctx: this process's place.
        seed: ``Global.seed``, for the dropout streams.
        clip_norm: global gradient norm to clip to; 0 measures it only.
    """

    def __init__(
        self,
        model: paddle.nn.Layer,
        loss_fn: LossFunction,
        optimizer: NamedOptimizer | None,
        ctx: ParallelContext,
        *,
        seed: int,
        clip_norm: float,
    ) -> None:
        self.model, self._loss_fn, self._optimizer, self._ctx = model, loss_fn, optimizer, ctx
        self._seed, self._clip_norm = seed, clip_norm

    def train_step(
        self, micro_batches: Sequence[MicroBatch], *, step: int, lr: float, weight_decay: float
    ) -> StepOutput:
        assert self._optimizer is not None, "this runner was made without an optimizer"
        self.model.train()
        # The divisor is known before the first backward, so every token weighs the same in any plan.
        num_valid = self._count_valid(micro_batches)
        losses = []
        for index, batch in enumerate(micro_batches):
            seed_step(self._seed, step, index, self._ctx.data_rank)
            micro_loss, _ = self._loss_fn(self.model, to_tensors(batch))
            (micro_loss / num_valid).backward()
            losses.append(micro_loss.detach())
        loss = self._ctx.sum_over_data(sum(micro.item() for micro in losses)) / num_valid
        grad_norm = clip_by_global_norm(self._parameters(), self._clip_norm)
        self._refuse_non_finite(loss, grad_norm, micro_batches)
        self._optimizer.step(lr=lr, weight_decay=weight_decay)
        self._optimizer.clear_grad()
        return StepOutput(loss=loss, num_valid_tokens=num_valid, grad_norm=grad_norm)

    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        self.model.eval()
        loss_sum = 0.0
        with paddle.no_grad():
            for batch in micro_batches:
                loss_sum += self._loss_fn(self.model, to_tensors(batch))[0].item()
        return self._ctx.sum_over_data(loss_sum), self._count_valid(micro_batches, at_least=0.0)

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        for parameter in self._parameters():
            yield parameter.info.name, parameter

    def optimizer_state(self) -> dict[tuple[str, str], Any]:
        return {} if self._optimizer is None else self._optimizer.state()

    def _parameters(self) -> list[paddle.Tensor]:
        return self.model.parameters()

    def _count_valid(self, micro_batches: Sequence[MicroBatch], at_least: float = 1.0) -> float:
        here = sum(float(batch["loss_mask"].sum(dtype=np.float64)) for batch in micro_batches)
        return max(self._ctx.sum_over_data(here), at_least)

    def _refuse_non_finite(self, loss: float, grad_norm: float, micro_batches: Sequence[MicroBatch]) -> None:
        for what, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                samples = [int(i) for batch in micro_batches for i in batch.get("sample_ids", ())]
                raise NonFiniteError(what, value, samples)


def to_tensors(batch: MicroBatch) -> dict[str, paddle.Tensor]:
    """Arrays of a micro batch as tensors on the current device; ``sample_ids`` stay on the host."""
    return {name: paddle.to_tensor(array) for name, array in batch.items() if name != "sample_ids"}
