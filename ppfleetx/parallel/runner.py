"""The runner interface, which the engine calls under every plan."""

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


class Runner(Protocol):
    """Executes steps of one model under one plan.

    Attributes:
        checks: ``Engine.checks``, which selects the checks of each step.
        before_update: a function called in each step before parameters and optimizer states change. Until
            then they are only read.
        judge: a function called in each step with the loss, the gradient norm, and a function that repeats
            the step and returns both again. The judge returns the loss and norm to use, and whether to take
            the step, the same on all ranks. Without loss scaling, the judge must refuse numbers that are not
            finite. None: every step is taken.
    """

    checks: str
    before_update: Callable[[], None]
    judge: Judge | None

    def count(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, ...]:
        """Return the counts of these micro batches on this rank: the loss count (``BasicModule.count``) and,
        with declared metrics, tokens and sequences.
        """
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
        """Run forward passes, backward passes and the update for one global batch.

        Args:
            counts: the sums of :meth:`count` over the job; None: the ranks compute them together.

        Raises:
            NonFiniteError: the loss or the gradient norm is not finite, and ``checks`` are not off; with loss
                scaling, only if no smaller scale is left. It is raised on every rank, before the update.
        """
        ...

    def finish_update(self) -> None:
        """Wait until all parameters have the values of the last update.

        All code that reads parameters calls this first: evaluation, ``named_parameters`` and the other
        methods here, and the engine when training ends.
        """
        ...

    def locate_non_finite(self, micro_batches: Sequence[MicroBatch], *, step: int) -> NonFinitePlace | None:
        """Return the first place on this rank where ``train_step`` produced a non-finite number, or None.

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
        """Return (canonical name, parameter) of each parameter on this rank, in model order."""
        ...

    def model_names(self) -> list[str]:
        """The canonical names of all parameters of the model. This is a collective: every rank calls it."""
        ...

    def writes(self, parameter: Any) -> bool:
        """Whether this rank, and no other, writes its slice of ``parameter`` into a checkpoint."""
        ...

    def optimizer_state(self) -> dict[tuple[str, str], Any]:
        """Return the live optimizer tensors on this rank, by (canonical name, state name)."""
        ...

    def scaler_state(self) -> dict[str, float | int] | None:
        """The state of the loss scale, the same on all ranks; None without loss scaling."""
        ...

    def load_scaler_state(self, state: Mapping[str, float | int] | None) -> None:
        """Restore a saved :meth:`scaler_state`. Does nothing if it is None, or without loss scaling."""
        ...
