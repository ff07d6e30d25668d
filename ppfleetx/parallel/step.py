"""One optimizer step, the same for every plan; subclasses decide how forward and backward run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import paddle
from paddle import distributed

from ppfleetx.data.loader import MicroBatch
from ppfleetx.distributed.checks import NonFinitePlace, NonFiniteSearch
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.random import DropoutStreams
from ppfleetx.distributed.together import gather
from ppfleetx.distributed.transfer import note_micro_batch, read, upload_all
from ppfleetx.nn.chunked_loss import PieceHead
from ppfleetx.parallel.activation_scales import ActivationScales
from ppfleetx.parallel.grad_sync import GradientSync
from ppfleetx.parallel.precision import Precision
from ppfleetx.parallel.runner import Judge, NonFiniteError, StepOutput, valid_tokens
from ppfleetx.parallel.sources import LOSS_AXES, SourceLosses

if TYPE_CHECKING:
    from ppfleetx.optims.adamw import Optimizer


@dataclass(frozen=True)
class StepOptions:
    """What a step needs to know beside model, optimizer and plan.

    Attributes:
        seed: ``Global.seed``, for the dropout streams.
        clip_norm: global gradient norm to clip to; 0 measures it only.
        precision: what is computed in which type.
    """

    seed: int = 0
    clip_norm: float = 0.0
    precision: Precision = field(default_factory=Precision)


class StepRunner(ABC):
    """Forward and backward of all micro batches, sum of the gradients, clip, update.

    Args:
        model: what this rank holds of the model.
        stages: (index in the model, layer) of what this rank holds.
        optimizer: None for a runner that only evaluates.
        ctx: this process's place.
        sync: sums and clips gradients.
        options: seed, clipping and precision.
        sources: hears the losses of rows.

    Attributes:
        checks: ``Engine.checks``. Unless ``off``, a loss or gradient norm that is not finite is an error;
            ``full`` looks at every output and gradient.
        before_update: called in each step before parameters and optimizer states change.
        judge: see :class:`Runner`.
        num_sources: sources whose losses are told apart; 0: they are not.
    """

    def __init__(
        self,
        model: paddle.nn.Layer,
        stages: Sequence[tuple[int, paddle.nn.Layer]],
        optimizer: Optimizer | None,
        ctx: ParallelContext,
        sync: GradientSync,
        options: StepOptions,
        sources: SourceLosses,
    ) -> None:
        self._sources = sources
        self._precision = options.precision
        self._model, self._optimizer, self._ctx, self._sync = model, optimizer, ctx, sync
        self._clip_norm, self._streams = options.clip_norm, DropoutStreams(options.seed, ctx)
        self._streams.attach(stages)
        for _, first in stages[:1]:  # a pipeline rank may hold none
            first.register_forward_pre_hook(lambda *_: note_micro_batch())
        self._search = NonFiniteSearch(stages)
        self._heads = [layer for _, layer in stages if isinstance(layer, PieceHead)]
        self._scales = ActivationScales(model, ctx)
        self.checks = "cheap"
        self.before_update: Callable[[], None] = lambda: None
        self.judge: Judge | None = None

    @property
    def model(self) -> paddle.nn.Layer:
        """What this rank holds of the model, with the values of the last update."""
        self.finish_update()
        return self._model

    def finish_update(self) -> None:
        """See :meth:`Runner.finish_update`."""
        self._sync.finish_values()

    @property
    def num_sources(self) -> int:
        return self._sources.count

    @num_sources.setter
    def num_sources(self, count: int) -> None:
        self._sources.count = count

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        step: int,
        lr: float,
        weight_decay: float,
        num_valid: float | None = None,
    ) -> StepOutput:
        assert self._optimizer is not None, "this runner was made without an optimizer"
        self._model.train()
        self._streams.begin_step(step)
        self._scales.begin()
        # The divisor is known before the first backward, so every token weighs the same in any plan.
        num_valid = self._count_valid(micro_batches) if num_valid is None else num_valid
        num_valid = max(num_valid, 1.0)
        self._sources.begin()
        loss, grad_norm, overflow = self._gradients(micro_batches, num_valid)
        sources, scale = self._sources.totals(self._ctx, micro_batches), self._precision.loss_scale
        told: dict[str, Any] = {} if sources is None else {"sources": sources}
        if self._precision.scaler is not None:
            told["loss_scale"] = scale
        accepted = self._accepts(loss, grad_norm, overflow, micro_batches)
        if accepted and self.judge is not None:
            loss, grad_norm, accepted = self.judge(
                loss, grad_norm, lambda: self._repeat(micro_batches, num_valid, step)
            )
        if not accepted:
            self._optimizer.clear_grad()
            return StepOutput(loss, num_valid, grad_norm, skipped=True, **told)
        self.before_update()
        self._optimizer.step(lr=lr, weight_decay=weight_decay)
        self._scales.update()
        self._optimizer.clear_grad()
        return StepOutput(loss, num_valid, grad_norm, **told)

    def _gradients(self, micro_batches: Sequence[MicroBatch], num_valid: float) -> tuple[float, float, bool]:
        """The step's gradients, summed over the ranks and clipped; the loss, and their norm before that; with
        loss scaling, whether either is not finite on any rank.

        All are read together, after all of a step's passes and sums have been queued: here alone does the
        host wait for the device. They are needed before the update, which a number that is not finite, or a
        spike, prevents.
        """
        with self._search if self.checks == "full" else nullcontext():
            loss_sum = self._passes(micro_batches, num_valid)
        loss_sum = self._ctx.sum_tensor_over(LOSS_AXES, loss_sum)
        self._sync.reduce()
        self._precision.unscale(self._sync.parameters, self._sync.ops)
        numbers = [loss_sum, self._sync.norm()]
        if self._precision.scaler is not None:
            numbers.append(self._overflows(numbers))
        loss, grad_norm, *overflow = read(paddle.stack(numbers)).tolist()
        self._sync.clip(grad_norm, self._clip_norm)
        return loss / num_valid, grad_norm, any(overflow)

    def _overflows(self, numbers: Sequence[paddle.Tensor]) -> paddle.Tensor:
        """On how many ranks one of the numbers is not finite. All must know: a step that was skipped on some
        of the ranks only would go unnoticed."""
        here = paddle.stack(list(numbers)).isfinite().all().logical_not().astype("float32")
        if self._ctx.world_size > 1:
            distributed.all_reduce(here)
        return here.astype("float64")

    def _repeat(
        self, micro_batches: Sequence[MicroBatch], num_valid: float, step: int
    ) -> tuple[float, float]:
        """:meth:`_gradients` once more: the weights are those of before the step, dropout belongs to it."""
        self._optimizer.clear_grad()
        self._streams.begin_step(step)
        return self._gradients(micro_batches, num_valid)[:2]

    def locate_non_finite(self, micro_batches: Sequence[MicroBatch], *, step: int) -> NonFinitePlace | None:
        if self.checks != "full":
            # The parameters are those of before the step and dropout belongs to it: the passes repeat.
            self._optimizer.clear_grad()
            self._streams.begin_step(step)
            with self._search:
                self._passes(micro_batches, max(self._count_valid(micro_batches), 1.0))
            self._sync.reduce()  # nothing is left under way between the ranks
        self._optimizer.clear_grad()
        return self._search.place

    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        self.model.eval()
        self._scales.begin()
        with paddle.no_grad(), self._precision.autocast(), self._loss_follows():
            loss_sum = self._forward(micro_batches)
        counted = self._count_valid(micro_batches)
        return float(read(self._ctx.sum_tensor_over(LOSS_AXES, loss_sum))), counted

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        for parameter in self.model.parameters():
            if parameter._is_initialized():  # sharding stage 3 keeps the values with their owners
                yield parameter.info.name, parameter

    def model_names(self) -> list[str]:
        names = [parameter.info.name for parameter in self._model.parameters()]
        return list(dict.fromkeys(name for held in gather(self._ctx, names) for name in held))

    def writes(self, parameter: Any) -> bool:
        return self._sync.counts(parameter) and self._ctx.rank_on("dp") == self._ctx.rank_on("sep") == 0

    def optimizer_state(self) -> dict[tuple[str, str], Any]:
        return {} if self._optimizer is None else self._optimizer.state()

    def scaler_state(self) -> dict[str, float | int] | None:
        return None if self._precision.scaler is None else self._precision.scaler.state()

    def load_scaler_state(self, state: Mapping[str, float | int] | None) -> None:
        if self._precision.scaler is not None and state is not None:
            self._precision.scaler.load_state(state)

    def _passes(self, micro_batches: Sequence[MicroBatch], num_valid: float) -> paddle.Tensor:
        """Forward and backward in the types of the precision, of the loss times its scale; the loss sum."""
        self._sync.begin(len(micro_batches))
        with self._precision.autocast(), self._loss_follows():
            return self._forward_backward(micro_batches, num_valid / self._precision.loss_scale)

    def _loss_follows(self) -> AbstractContextManager[None]:
        """Within, the head may leave the logits to the loss (``Model.loss_chunks``)."""
        return self._heads[0].loss_follows() if self._heads else nullcontext()

    def _accepts(
        self, loss: float, grad_norm: float, overflow: bool, micro_batches: Sequence[MicroBatch]
    ) -> bool:
        """Whether the step is taken: float16 skips a step that overflowed, on all ranks, and tries the next
        with a smaller loss scale. Where that cannot help, what is not finite ends the run."""
        scaler = self._precision.scaler
        if scaler is None:
            if self.checks != "off" and self.judge is None:
                self._refuse_non_finite(loss, grad_norm, micro_batches)
            return True
        if overflow and not scaler.can_shrink:
            kind = "smallest" if scaler.dynamic else "constant"
            where = f" (at the {kind} loss scale, {scaler.scale:g})"
            self._refuse_non_finite(loss, grad_norm, micro_batches, where)
            raise NonFiniteError(f"a number on another rank{where}", math.inf, [])
        scaler.update(overflow)
        return not overflow

    @abstractmethod
    def _forward_backward(self, micro_batches: Sequence[MicroBatch], num_valid: float) -> paddle.Tensor:
        """Add the gradient of (loss sum / ``num_valid``) to all parameters here; give the loss sum, a
        float64 tensor that has not been waited for."""

    @abstractmethod
    def _forward(self, micro_batches: Sequence[MicroBatch]) -> paddle.Tensor:
        """Loss sum of the tokens whose loss this rank computes, as of :meth:`_forward_backward`."""

    def _count_valid(self, micro_batches: Sequence[MicroBatch]) -> float:
        return self._ctx.sum_over_data(valid_tokens(micro_batches))

    def _refuse_non_finite(
        self, loss: float, grad_norm: float, micro_batches: Sequence[MicroBatch], where: str = ""
    ) -> None:
        for what, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                samples = [int(i) for batch in micro_batches for i in batch.get("sample_ids", ())]
                raise NonFiniteError(what + where, value, samples)


def to_tensors(batch: MicroBatch) -> dict[str, paddle.Tensor]:
    """Arrays of a micro batch as tensors on the current device; ``sample_ids`` stay on the host."""
    return upload_all({name: array for name, array in batch.items() if name != "sample_ids"})


def sum_of(losses: Sequence[paddle.Tensor]) -> paddle.Tensor:
    """Sum of scalars in float64, on the device; nobody waits for it."""
    if not losses:
        return paddle.zeros([], "float64")
    return paddle.stack([loss.astype("float64") for loss in losses]).sum()
