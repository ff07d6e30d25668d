"""The runner interface: what the engine calls, whatever the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ppfleetx.data.loader import MicroBatch
from ppfleetx.models.evaluator import EvalOutput, Metric

if TYPE_CHECKING:
    from ppfleetx.distributed.checks import NonFinitePlace


@dataclass(frozen=True)
class StepOutput:
    """The result of one optimizer step over the whole job.

    Attributes:
        loss: sum of the loss over valid tokens divided by their number, over all micro batches and
            data ranks.
        num_valid_tokens: tokens that count in the loss.
        grad_norm: global L2 norm of the gradients before clipping.
        loss_scale: what the loss was multiplied by (float16); None without loss scaling.
        skipped: the gradients overflowed, or the step was refused; neither parameters nor optimizer states
            changed.
        metrics: the task's, by name, of the first pass where the step was repeated; without those of which
            nothing counted.
    """

    loss: float
    num_valid_tokens: float
    grad_norm: float
    loss_scale: float | None = None
    skipped: bool = False
    metrics: Mapping[str, Metric] = field(default_factory=dict)


class NonFiniteError(RuntimeError):
    """Loss or gradient is NaN or infinite. The parameters are those of before the step."""

    def __init__(self, what: str, value: float, sample_ids: Sequence[int]) -> None:
        super().__init__(f"{what} is {value}")
        self.what, self.value, self.sample_ids = what, value, list(sample_ids)


Judge = Callable[[float, float, Callable[[], tuple[float, float]]], tuple[float, float, bool]]


class Runner(Protocol):
    """Executes steps of one model under one plan.

    Attributes:
        checks: ``Engine.checks``: what is checked in each step.
        before_update: called in each step before parameters and optimizer states change; until then they
            are only read.
        judge: called in each step with the loss, the gradient norm, and a function that computes the step
            again and returns both. It returns the two that count and whether the step is taken, the same on
            all ranks. None: every step is taken. Unless the loss is scaled, it is the judge that refuses
            numbers that are not finite.
    """

    checks: str
    before_update: Callable[[], None]
    judge: Judge | None

    def count(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, ...]:
        """Return the counts of these micro batches on this rank: first the loss count
        (``BasicModule.count``); with declared metrics also tokens and sequences."""
        ...

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        step: int,
        lr: float,
        weight_decay: float,
        counts: Sequence[float] | None = None,
    ) -> StepOutput:
        """Forward, backward and update over one global batch.

        Args:
            counts: the sums over the job of :meth:`count`; None: the ranks ask each other.

        Raises:
            NonFiniteError: on every rank and before the update, when the loss or the gradient norm is not
                finite (and ``checks`` are not off); with loss scaling, when no smaller scale is left.
        """
        ...

    def finish_update(self) -> None:
        """Wait until all parameters have the values of the last update.

        All that reads parameters calls it first: evaluation, ``named_parameters`` and the other methods here,
        and the engine when training ends.
        """
        ...

    def locate_non_finite(self, micro_batches: Sequence[MicroBatch], *, step: int) -> NonFinitePlace | None:
        """Return the first place on this rank where ``train_step`` produced a non-finite number; None if
        there is none.

        Every rank of the job calls this after :class:`NonFiniteError`, with the arguments of ``train_step``.
        """
        ...

    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> EvalOutput:
        """Return loss and metrics of a batch over the whole job."""
        ...

    def compute(
        self, function: Callable[[Any, dict[str, Any]], Any], micro_batches: Sequence[MicroBatch]
    ) -> list[np.ndarray]:
        """Return ``function(model, tensors)`` for each micro batch of this rank, in evaluation mode.

        A pipeline, where no rank holds the whole model, has no such method.
        """
        ...

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """(canonical name, parameter) of what this rank holds, in model order."""
        ...

    def model_names(self) -> list[str]:
        """The canonical names of all parameters of the model. Collective: every rank calls it."""
        ...

    def writes(self, parameter: Any) -> bool:
        """Whether this rank, and no other, writes its slice of ``parameter`` into a checkpoint."""
        ...

    def optimizer_state(self) -> dict[tuple[str, str], Any]:
        """{(canonical name, state name): live tensor} of what this rank holds."""
        ...

    def scaler_state(self) -> dict[str, float | int] | None:
        """State of the loss scale, the same on all ranks; None without loss scaling."""
        ...

    def load_scaler_state(self, state: Mapping[str, float | int] | None) -> None:
        """Restore a saved :meth:`scaler_state`; do nothing without one or without loss scaling."""
        ...
