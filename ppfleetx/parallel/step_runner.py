"""Base class of runners, which run the optimizer steps of a model, and the runner for parallel plans without
a pipeline."""

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

from ppfleetx.data.dataloader import MicroBatch
from ppfleetx.distributed.consistency_checks import NonFinitePlace, NonFiniteSearch
from ppfleetx.distributed.context import DATA_AXES, ParallelContext
from ppfleetx.distributed.coordination import gather
from ppfleetx.distributed.host_device_copy import note_micro_batch, read, upload_all
from ppfleetx.distributed.random import DropoutStreams
from ppfleetx.models.evaluator import EvalOutput, Metric
from ppfleetx.nn.aux_loss import AuxLossScope, counts_of, divisors_of
from ppfleetx.nn.chunked_loss import ChunkedHead
from ppfleetx.nn.loss_output import as_loss_output
from ppfleetx.parallel.grad_sync import GradientSync
from ppfleetx.parallel.mixed_precision import Precision
from ppfleetx.parallel.step_metrics import ActivationScales, ExpertLoads, StepSums

if TYPE_CHECKING:
    from ppfleetx.models.module import BasicModule
    from ppfleetx.nn.stage import LayerFactory
    from ppfleetx.optims.optimizer import Optimizer


@dataclass(frozen=True)
class StepOutput:
    """The result of one optimizer step over the whole job.

    Attributes:
        loss: mean loss over the valid tokens of the global batch.
        grad_norm: global L2 norm of the gradients before clipping.
        loss_scale: loss scale of float16; None without loss scaling.
        skipped: whether the update was skipped, because gradients overflowed or ``StepRunner.judge`` rejected
            the update.
        metrics: metrics by name, without metrics whose count is 0. If the gradients were computed twice
            (:data:`Judge`), the metrics are from the first computation.
    """

    loss: float
    num_valid_tokens: float
    grad_norm: float
    loss_scale: float | None = None
    skipped: bool = False
    metrics: Mapping[str, Metric] = field(default_factory=dict)


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is NaN or infinite. The step has not changed the parameters."""

    def __init__(self, what: str, value: float, sample_ids: Sequence[int]) -> None:
        super().__init__(f"{what} is {value}")
        self.what, self.value, self.sample_ids = what, value, list(sample_ids)


Judge = Callable[[float, float, Callable[[], tuple[float, float]]], tuple[float, float, bool]]
"""A function that decides in each step whether the update is applied.

Its arguments are the loss, the gradient norm, and a function that computes the gradients again and returns
the new loss and norm. It returns the loss and norm to use, and whether to update, the same on all ranks.
Without loss scaling, it must reject non-finite numbers.
"""


@dataclass(frozen=True)
class StepOptions:
    """Settings of training steps, apart from model, optimizer and parallel plan.

    Attributes:
        clip_norm: maximum global norm of the gradients; 0: no clipping.
        metrics: names of the metrics that the model's layers report.
        routers: number of experts of each router of the model, by canonical name.
    """

    seed: int = 0
    clip_norm: float = 0.0
    precision: Precision = field(default_factory=Precision)
    metrics: tuple[str, ...] = ()
    routers: Mapping[str, int] = field(default_factory=dict)


class StepRunner(ABC):
    """Runs the steps of one model: forward and backward passes of all micro batches, gradient reduction,
    clipping and update.

    Args:
        indexed_layers: the model's layers on this rank, such as the embedding and the blocks, each as (index
            in the model, layer).
        optimizer: None for a runner that only evaluates.

    Attributes:
        checks: the value of ``Engine.checks``. With ``off``, non-finite numbers raise an error only under
            loss scaling.
        before_update: function that is called in each step before parameters and optimizer states change.
        judge: function that can reject the update of a step (:data:`Judge`), or None.
    """

    def __init__(
        self,
        model: paddle.nn.Layer,
        indexed_layers: Sequence[tuple[int, paddle.nn.Layer]],
        optimizer: Optimizer | None,
        ctx: ParallelContext,
        sync: GradientSync,
        options: StepOptions,
        module: BasicModule,
        factory: LayerFactory,
    ) -> None:
        self._module, self._factory = module, factory
        self._sums = StepSums((*module.metrics, *options.metrics), ctx)
        self._scope = AuxLossScope(factory, ctx, self._sums.add_metric)
        if optimizer is not None or self._sums.names:  # hooks would keep generation from fusing blocks
            self._scope.watch(layer for _, layer in indexed_layers)
        self._precision = options.precision
        self._model, self._optimizer, self._ctx, self._sync = model, optimizer, ctx, sync
        self._clip_norm, self._streams = options.clip_norm, DropoutStreams(options.seed, ctx)
        self._streams.attach(indexed_layers)
        for _, first in indexed_layers[:1]:  # a pipeline rank can have no layers
            first.register_forward_pre_hook(lambda *_: note_micro_batch())
        self._search = NonFiniteSearch(indexed_layers)
        self._heads = [layer for _, layer in indexed_layers if isinstance(layer, ChunkedHead)]
        self._scales = ActivationScales(model, ctx)
        self._loads = ExpertLoads(model, options.routers, ctx, factory.hidden_same_on)
        self.checks = "cheap"
        self.before_update: Callable[[], None] = lambda: None
        self.judge: Judge | None = None

    @property
    def model(self) -> paddle.nn.Layer:
        """This rank's part of the model, after the last update has completed."""
        self.finish_update()
        return self._model

    def finish_update(self) -> None:
        """Wait until all parameters have the values of the last update. Call this before reading parameter
        values."""
        self._sync.finish_values()

    def count(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, ...]:
        """Return how many of this rank's tokens (for a classifier, examples) contribute to the loss. If
        metrics are declared, the tuple also has the rank's numbers of valid tokens and valid sequences. The
        sums of these numbers over the job are the divisors of the step's loss and metrics."""
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

        Args:
            micro_batches: the micro batches of this rank.
            step: number of the step, which determines dropout.
            counts: sums of :meth:`count` over the job; None: a collective computes them here.

        Raises:
            NonFiniteError: the loss or the gradient norm is not finite. Raised on every rank, before the
                update. With loss scaling, the step is skipped instead as long as the loss scale can shrink.
                Without loss scaling, nothing is raised if ``checks`` is ``off`` or ``judge`` is set.
        """
        assert self._optimizer is not None, "this runner was made without an optimizer"
        self._model.train()
        self._streams.begin_step(step)
        self._scales.begin()
        # The loss is divided by the job's token count before the backward pass, so that every token has the
        # same weight under any plan.
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
        if self._precision.scaler is not None:  # after judge, which can repeat the step with the same scale
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
        """Compute the gradients of a step, summed over the ranks and clipped. Returns the loss, the norm
        before clipping, whether float16 overflowed on any rank, and the metrics."""
        with self._search if self.checks == "full" else nullcontext():
            self._passes(micro_batches, counts)
        sums = self._sums.over_job()
        self._sync.reduce()
        self._precision.unscale(self._sync.parameters, self._sync.ops)
        numbers = [sums[0], self._sync.norm()]
        if self._precision.scaler is not None:
            numbers.append(self._overflowing_ranks(numbers))
        # The host waits for the device here, because the update depends on these numbers.
        values = read(paddle.stack([*sums.unbind(), *numbers[1:]])).tolist()
        found, (grad_norm, *overflow) = values[: len(sums)], values[len(sums) :]
        self._sync.clip(grad_norm, self._clip_norm)
        loss, metrics = self._sums.read(found)
        return loss / max(counts[0], 1.0), grad_norm, any(overflow), metrics

    def _overflowing_ranks(self, numbers: Sequence[paddle.Tensor]) -> paddle.Tensor:
        """Return, on every rank, the number of ranks on which any of ``numbers`` is NaN or infinite."""
        here = paddle.stack(list(numbers)).isfinite().all().logical_not().astype("float32")
        if self._ctx.world_size > 1:
            distributed.all_reduce(here)
        return here.astype("float64")

    def _repeat(
        self, micro_batches: Sequence[MicroBatch], counts: Sequence[float], step: int
    ) -> tuple[float, float]:
        """Compute the gradients of a step again, with unchanged weights and the same dropout, and return the
        loss and the gradient norm. :data:`Judge` compares them with the first results."""
        self._optimizer.clear_grad()
        self._streams.begin_step(step)
        return self._gradients(micro_batches, counts)[:2]

    def locate_non_finite(self, micro_batches: Sequence[MicroBatch], *, step: int) -> NonFinitePlace | None:
        """Return the first layer output or gradient on this rank in which ``train_step`` produced a
        non-finite number; None if there is none.

        After a :class:`NonFiniteError`, all ranks must call this method, because it is a collective. The
        arguments must be those of ``train_step``.
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
        """Yield (canonical name, parameter) for the parameters whose values this rank keeps, in model order.
        In sharding stage 3, these are the parameters that it owns."""
        for parameter in self.model.parameters():
            if parameter._is_initialized():  # in sharding stage 3, the owners keep the values
                yield parameter.info.name, parameter

    def model_names(self) -> list[str]:
        """Return the canonical names of all parameters of the whole model. All ranks must call this."""
        names = [parameter.info.name for parameter in self._model.parameters()]
        return list(dict.fromkeys(name for held in gather(self._ctx, names) for name in held))

    def writes(self, parameter: Any) -> bool:
        """Return whether this rank writes its slice of ``parameter`` into a checkpoint. Exactly one of
        the ranks with the same slice does."""
        return self._sync.writes(parameter)

    def optimizer_state(self) -> dict[tuple[str, str], Any]:
        """Return the optimizer's tensors on this rank, without copies, by (canonical name, state name)."""
        return {} if self._optimizer is None else self._optimizer.state()

    def scaler_state(self) -> dict[str, float | int] | None:
        """Return the state of the loss scale, the same on all ranks; None without loss scaling."""
        return None if self._precision.scaler is None else self._precision.scaler.state()

    def load_scaler_state(self, state: Mapping[str, float | int] | None) -> None:
        """Restore the state of the loss scale from a checkpoint. Does nothing without loss scaling or if
        ``state`` is None."""
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
        """Return a context manager in which the head can return deferred logits, which the loss computes in
        chunks (``Model.loss_chunks``)."""
        return self._heads[0].loss_follows() if self._heads else nullcontext()

    def _accepts(
        self, loss: float, grad_norm: float, overflow: bool, micro_batches: Sequence[MicroBatch]
    ) -> bool:
        """Return whether to apply the update; False if float16 gradients overflowed. Raises NonFiniteError as
        described in :meth:`train_step`."""
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
        """Run all forward and backward passes of a step, without waiting for the device. The backward passes
        start from the loss divided by ``num_valid``. The undivided loss and the metrics are added to this
        rank's sums."""

    @abstractmethod
    def _forward(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run the forward passes of an evaluation batch, and add losses and metrics to this rank's sums."""

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
    """Runs the steps of a model whose stages are all in this process. Under tensor parallelism, the
    parameters are slices.

    Args:
        sync: reduces gradients over the job; None for a job of one process.
    """

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
        indexed_layers = list(enumerate(model.stages))
        super().__init__(
            model, indexed_layers, optimizer, ctx, sync, options or StepOptions(), module, factory
        )

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
        """Return the results of ``function(model, tensors)`` as arrays, one for each micro batch of this
        rank. The model is in evaluation mode."""
        self.model.eval()
        self._scales.begin()
        with self._precision.autocast():
            return [read(function(self._model, to_tensors(batch))) for batch in micro_batches]


def to_tensors(batch: MicroBatch) -> dict[str, paddle.Tensor]:
    """Copy the arrays of a micro batch, without ``sample_ids``, to the current device."""
    return upload_all({name: array for name, array in batch.items() if name != "sample_ids"})
