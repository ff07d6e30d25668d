"""One optimizer step, the same for every plan, and the runner of plans without pipelines."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle import distributed

from ppfleetx.data.loader import MicroBatch
from ppfleetx.distributed.checks import NonFinitePlace, NonFiniteSearch
from ppfleetx.distributed.context import DATA_AXES, ParallelContext
from ppfleetx.distributed.coordination import gather
from ppfleetx.distributed.random import DropoutStreams
from ppfleetx.distributed.transfer import note_micro_batch, read, upload_all
from ppfleetx.models.evaluator import EvalOutput, Metric
from ppfleetx.nn.aux_loss import StepScope, counts_of, divisors_of
from ppfleetx.nn.chunked_loss import PieceHead
from ppfleetx.nn.loss_output import as_loss_output
from ppfleetx.parallel.grad_sync import GradientSync
from ppfleetx.parallel.precision import Precision
from ppfleetx.parallel.step_sums import ActivationScales, ExpertLoads, StepSums

if TYPE_CHECKING:
    from ppfleetx.models.module import BasicModule
    from ppfleetx.nn.stage import LayerFactory
    from ppfleetx.optims.optimizer import Optimizer


@dataclass(frozen=True)
class StepOutput:
    """The result of one optimizer step over the whole job.

    Attributes:
        loss: sum of the loss over valid tokens divided by their number, over all micro batches and
            data ranks.
        grad_norm: global L2 norm of the gradients before clipping.
        loss_scale: the factor of the loss (float16); None without loss scaling.
        skipped: whether the step changed neither parameters nor optimizer states, because the gradients
            overflowed or the step was refused.
        metrics: the task's metrics by name, without metrics that counted nothing. If the step was repeated,
            they are from its first run.
    """

    loss: float
    num_valid_tokens: float
    grad_norm: float
    loss_scale: float | None = None
    skipped: bool = False
    metrics: Mapping[str, Metric] = field(default_factory=dict)


class NonFiniteError(RuntimeError):
    """The loss or a gradient is NaN or infinite. The parameters have their values from before the step."""

    def __init__(self, what: str, value: float, sample_ids: Sequence[int]) -> None:
        super().__init__(f"{what} is {value}")
        self.what, self.value, self.sample_ids = what, value, list(sample_ids)


Judge = Callable[[float, float, Callable[[], tuple[float, float]]], tuple[float, float, bool]]
"""Called in each step with the loss, the gradient norm, and a function that repeats the step and returns both
again. Returns the loss and norm to use, and whether to take the step, the same on all ranks. Without loss
scaling, it must refuse numbers that are not finite."""


@dataclass(frozen=True)
class StepOptions:
    """Settings of a step besides model, optimizer and plan.

    Attributes:
        clip_norm: global gradient norm to clip to; 0 measures it only.
        metrics: names of the metrics that the model's layers report, besides the task's own.
        routers: number of experts of each router of the model, by canonical name.
    """

    seed: int = 0
    clip_norm: float = 0.0
    precision: Precision = field(default_factory=Precision)
    metrics: tuple[str, ...] = ()
    routers: Mapping[str, int] = field(default_factory=dict)


class StepRunner(ABC):
    """Runs steps of one model under one plan: forward and backward of all micro batches, gradient sum,
    clipping, update. The engine calls it under every plan.

    Args:
        stages: (index in the model, layer) of each stage on this rank.
        optimizer: None for a runner that only evaluates.

    Attributes:
        checks: ``Engine.checks``. Unless ``off``, a loss or gradient norm that is not finite is an error;
            ``full`` checks every output and gradient.
        before_update: a function called in each step before parameters and optimizer states change. Until
            then they are only read.
        judge: see :data:`Judge`; None: every step is taken.
    """

    def __init__(
        self,
        model: paddle.nn.Layer,
        stages: Sequence[tuple[int, paddle.nn.Layer]],
        optimizer: Optimizer | None,
        ctx: ParallelContext,
        sync: GradientSync,
        options: StepOptions,
        module: BasicModule,
        factory: LayerFactory,
    ) -> None:
        self._module, self._factory = module, factory
        self._sums = StepSums((*module.metrics, *options.metrics), ctx)
        self._scope = StepScope(factory, ctx, self._sums.add_metric)
        if optimizer is not None or self._sums.names:  # hooks keep generation from fusing blocks
            self._scope.watch(layer for _, layer in stages)
        self._precision = options.precision
        self._model, self._optimizer, self._ctx, self._sync = model, optimizer, ctx, sync
        self._clip_norm, self._streams = options.clip_norm, DropoutStreams(options.seed, ctx)
        self._streams.attach(stages)
        for _, first in stages[:1]:  # a pipeline rank may hold none
            first.register_forward_pre_hook(lambda *_: note_micro_batch())
        self._search = NonFiniteSearch(stages)
        self._heads = [layer for _, layer in stages if isinstance(layer, PieceHead)]
        self._scales = ActivationScales(model, ctx)
        self._loads = ExpertLoads(model, options.routers, ctx, factory.hidden_same_on)
        self.checks = "cheap"
        self.before_update: Callable[[], None] = lambda: None
        self.judge: Judge | None = None

    @property
    def model(self) -> paddle.nn.Layer:
        """This rank's part of the model, with the values of the last update."""
        self.finish_update()
        return self._model

    def finish_update(self) -> None:
        """Wait until all parameters have the values of the last update.

        All code that reads parameters calls this first: evaluation, ``named_parameters`` and the other
        methods here, and the engine when training ends.
        """
        self._sync.finish_values()

    def count(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, ...]:
        """The counts of these micro batches on this rank: the loss count (``BasicModule.count``) and, with
        declared metrics, tokens and sequences.
        """
        in_loss = sum(self._module.count(batch) for batch in micro_batches)
        return (in_loss, *(counts_of(micro_batches) if self._sums.names else ()))

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        step: int,
        lr: float,
        weight_decay: float,
        counts: Sequence[float] | None = None,
    ) -> StepOutput:
        """Run forward passes, backward passes and the update for one global batch.

        ``counts`` are the sums of :meth:`count` over the job; None: the ranks compute them together.

        Raises:
            NonFiniteError: the loss or the gradient norm is not finite, and ``checks`` are not off; with loss
                scaling, only if no smaller scale is left. It is raised on every rank, before the update.
        """
        assert self._optimizer is not None, "this runner was made without an optimizer"
        self._model.train()
        self._streams.begin_step(step)
        self._scales.begin()
        # The divisors are known before the first backward pass, so every token weighs the same in any plan.
        counts = self._count_over_job(micro_batches) if counts is None else counts
        num_valid = max(counts[0], 1.0)
        loss, grad_norm, overflow, metrics = self._gradients(micro_batches, counts)
        more: dict[str, Any] = {"metrics": {**metrics, **self._loads.count()}}
        if self._precision.scaler is not None:
            more["loss_scale"] = self._precision.loss_scale
        accepted = self._accepts(loss, grad_norm, overflow, micro_batches)
        if accepted and self.judge is not None:
            loss, grad_norm, accepted = self.judge(
                loss, grad_norm, lambda: self._repeat(micro_batches, counts, step)
            )
        if self._precision.scaler is not None:  # only after the step has been repeated with the same scale
            self._precision.scaler.update(overflow)
        if not accepted:
            self._optimizer.clear_grad()
            return StepOutput(loss, num_valid, grad_norm, skipped=True, **more)
        self.before_update()
        self._optimizer.step(lr=lr, weight_decay=weight_decay)
        self._scales.update()
        self._loads.update()
        self._optimizer.clear_grad()
        return StepOutput(loss, num_valid, grad_norm, **more)

    def _gradients(
        self, micro_batches: Sequence[MicroBatch], counts: Sequence[float]
    ) -> tuple[float, float, bool, Mapping[str, Metric]]:
        """Compute the step's gradients, summed over the ranks and clipped.

        All numbers are read together, after all passes and sums of the step have been queued. Only here does
        the host wait for the device. The numbers are needed before the update, because a spike or a number
        that is not finite prevents it.

        Returns the loss; the norm of the gradients before clipping; whether either is non-finite on any rank
        (only with loss scaling); the metrics.
        """
        with self._search if self.checks == "full" else nullcontext():
            self._passes(micro_batches, counts)
        sums = self._sums.over_job()
        self._sync.reduce()
        self._precision.unscale(self._sync.parameters, self._sync.ops)
        numbers = [sums[0], self._sync.norm()]
        if self._precision.scaler is not None:
            numbers.append(self._overflows(numbers))
        values = read(paddle.stack([*sums.unbind(), *numbers[1:]])).tolist()
        found, (grad_norm, *overflow) = values[: len(sums)], values[len(sums) :]
        self._sync.clip(grad_norm, self._clip_norm)
        loss, metrics = self._sums.read(found)
        return loss / max(counts[0], 1.0), grad_norm, any(overflow), metrics

    def _overflows(self, numbers: Sequence[paddle.Tensor]) -> paddle.Tensor:
        """The number of ranks with a non-finite number. All ranks must know it: a step that only some of
        them skip would go unnoticed."""
        here = paddle.stack(list(numbers)).isfinite().all().logical_not().astype("float32")
        if self._ctx.world_size > 1:
            distributed.all_reduce(here)
        return here.astype("float64")

    def _repeat(
        self, micro_batches: Sequence[MicroBatch], counts: Sequence[float], step: int
    ) -> tuple[float, float]:
        """Compute :meth:`_gradients` again, with the weights from before the step and the same dropout."""
        self._optimizer.clear_grad()
        self._streams.begin_step(step)
        return self._gradients(micro_batches, counts)[:2]

    def locate_non_finite(self, micro_batches: Sequence[MicroBatch], *, step: int) -> NonFinitePlace | None:
        """The first place on this rank where ``train_step`` produced a non-finite number, or None.

        Every rank of the job calls this after :class:`NonFiniteError`, with the arguments of ``train_step``.
        """
        if self.checks != "full":
            # The parameters are unchanged, and dropout depends on the step, so the passes repeat exactly.
            self._optimizer.clear_grad()
            self._streams.begin_step(step)
            with self._search:
                self._passes(micro_batches, self._count_over_job(micro_batches))
            self._sync.reduce()  # no message is left in transit
        self._optimizer.clear_grad()
        return self._search.place

    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> EvalOutput:
        self.model.eval()
        self._scales.begin()
        self._sums.begin()
        with (
            self._scope.step(micro_batches),
            paddle.no_grad(),
            self._precision.autocast(),
            self._loss_follows(),
        ):
            self._forward(micro_batches)
        count = self._count_over_job(micro_batches)[0]
        loss, metrics = self._sums.read(read(self._sums.over_job()).tolist())
        return EvalOutput(loss, count, metrics)

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """(canonical name, parameter) of each parameter on this rank, in model order."""
        for parameter in self.model.parameters():
            if parameter._is_initialized():  # in sharding stage 3, the owners keep the values
                yield parameter.info.name, parameter

    def model_names(self) -> list[str]:
        """The canonical names of all parameters of the model. This is a collective: every rank calls it."""
        names = [parameter.info.name for parameter in self._model.parameters()]
        return list(dict.fromkeys(name for held in gather(self._ctx, names) for name in held))

    def writes(self, parameter: Any) -> bool:
        """Whether this rank, and no other, writes its slice of ``parameter`` into a checkpoint."""
        return self._sync.writes(parameter)

    def optimizer_state(self) -> dict[tuple[str, str], Any]:
        """The live optimizer tensors on this rank, by (canonical name, state name)."""
        return {} if self._optimizer is None else self._optimizer.state()

    def scaler_state(self) -> dict[str, float | int] | None:
        """The state of the loss scale, the same on all ranks; None without loss scaling."""
        return None if self._precision.scaler is None else self._precision.scaler.state()

    def load_scaler_state(self, state: Mapping[str, float | int] | None) -> None:
        """Restore a saved :meth:`scaler_state`. Does nothing if it is None, or without loss scaling."""
        if self._precision.scaler is not None and state is not None:
            self._precision.scaler.load_state(state)

    def _passes(self, micro_batches: Sequence[MicroBatch], counts: Sequence[float]) -> None:
        self._sync.begin(len(micro_batches))
        self._sums.begin()
        self._loads.begin()
        scale = self._precision.loss_scale
        num_valid, *of_metrics = counts
        divisors = divisors_of(of_metrics) if of_metrics else None
        with (
            self._scope.step(micro_batches, divisors, scale),
            self._precision.autocast(),
            self._loss_follows(),
        ):
            self._forward_backward(micro_batches, max(num_valid, 1.0) / scale)

    def _loss_follows(self) -> AbstractContextManager[None]:
        """Context manager in which the head may return :class:`LogitsInPieces` (``Model.loss_chunks``)."""
        return self._heads[0].loss_follows() if self._heads else nullcontext()

    def _accepts(
        self, loss: float, grad_norm: float, overflow: bool, micro_batches: Sequence[MicroBatch]
    ) -> bool:
        """Whether the update is applied. With float16, all ranks skip a step that overflowed, and the loss
        scale shrinks. If the scale cannot shrink, a non-finite number ends the run."""
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
        return not overflow

    @abstractmethod
    def _forward_backward(self, micro_batches: Sequence[MicroBatch], num_valid: float) -> None:
        """Add the gradient of (loss sum / ``num_valid``) to the gradients of all local parameters, and the
        loss to the sums, without waiting for the device."""

    @abstractmethod
    def _forward(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run forward passes and add the loss to the sums."""

    def _count_over_job(self, micro_batches: Sequence[MicroBatch]) -> list[float]:
        return self._ctx.sum_over(DATA_AXES, *self.count(micro_batches))

    def _refuse_non_finite(
        self, loss: float, grad_norm: float, micro_batches: Sequence[MicroBatch], where: str = ""
    ) -> None:
        for what, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                samples = [int(i) for batch in micro_batches for i in batch.get("sample_ids", ())]
                raise NonFiniteError(what + where, value, samples)


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


def to_tensors(batch: MicroBatch) -> dict[str, paddle.Tensor]:
    """Copy the arrays of a micro batch to the current device. ``sample_ids`` stay on the host."""
    return upload_all({name: array for name, array in batch.items() if name != "sample_ids"})
