"""Classes through which callbacks and checkpoint saving see a run: its model, its progress, and the results
of steps and evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.engine.train_state import TrainState
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.models.evaluator import Metric
from ppfleetx.optims.schedules import Schedule

if TYPE_CHECKING:
    from ppfleetx.parallel.step_runner import StepRunner
    from ppfleetx.planner.mfu import Utilization

SOURCE = "source/"
"""Name prefix of the metrics that report the loss of each corpus in a blend."""


class Run(Protocol):
    """The part of the engine that callbacks and checkpoint saving may read, but not change. ``state`` is
    the run's progress. It already includes the current step or evaluation, except in
    :meth:`Callback.on_spike`. ``schedule`` is None if the engine only evaluates."""

    cfg: RunConfig
    ctx: ParallelContext
    runner: StepRunner
    schedule: Schedule | None
    state: TrainState

    @property
    def max_steps(self) -> int:
        """The number of optimizer steps of the whole run."""

    @property
    def utilization(self) -> Utilization | None:
        """The :class:`Utilization` that computes TFLOP/s and MFU from the time of a step. None if the FLOPs
        of the model are unknown."""

    def callback_states(self) -> dict[str, Any]:
        """Return the states of this rank's callbacks, by name. Raises CheckpointError if a state has values
        that JSON cannot represent."""


@dataclass(frozen=True)
class StepRecord:
    """The results of one optimizer step.

    Attributes:
        step: number of the step, from 1.
        epoch: index of the current pass over the training split, from 0.
        batch: index of the step within that pass, from 0.
        loss: mean over all tokens of the global batch that count in the loss.
        lr, weight_decay: values used in this step.
        grad_norm: gradient norm before clipping.
        num_valid_tokens: number of tokens that count in the loss.
        num_tokens: number of all tokens in the global batch.
        batch_size: number of sequences of the global batch.
        data_size: number of data-parallel ranks.
        reader_cost: seconds spent waiting for data.
        batch_cost: seconds of the whole step, including ``reader_cost``.
        loss_scale: loss scale of float16; None without loss scaling.
        skipped: whether nothing was updated, because gradients overflowed or the step was a loss spike.
        metrics: metrics of the task and of the model's layers, by name.
        pruned: fraction of zero weights in the pruned matrices; None without ``Compress.Prune``.
    """

    step: int
    epoch: int
    batch: int
    loss: float
    lr: float
    weight_decay: float
    grad_norm: float
    num_valid_tokens: float
    num_tokens: int
    batch_size: int
    data_size: int
    reader_cost: float
    batch_cost: float
    loss_scale: float | None = None
    skipped: bool = False
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    pruned: float | None = None

    @property
    def sources(self) -> dict[str, Metric]:
        return {
            name.removeprefix(SOURCE): found
            for name, found in self.metrics.items()
            if name.startswith(SOURCE)
        }

    @property
    def own_metrics(self) -> dict[str, float]:
        return {name: found.mean for name, found in self.metrics.items() if not name.startswith(SOURCE)}


@dataclass(frozen=True)
class EvalRecord:
    """The result of evaluating one evaluation set after ``step`` training steps.

    Attributes:
        loss: mean over the tokens that count in the loss or, for a classifier, over the examples; NaN if
            the examples have no labels.
        ppl: perplexity; None for a classifier.
        num_valid_tokens: number of tokens that count in the loss or, for a classifier, of examples.
        metrics: the task's metrics by name.
        outputs: outputs of a classifier, ``[examples, outputs]`` in the order of the data file.
        name: name of the evaluation set; None if ``Data.Eval.sets`` is not used.
    """

    step: int
    loss: float
    ppl: float | None
    num_valid_tokens: float
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    outputs: np.ndarray | None = field(default=None, repr=False, compare=False)
    name: str | None = None


class Window:
    """Computes mean step times and speeds since the last log line."""

    def __init__(self) -> None:
        self.num_steps = self._tokens = self.num_skipped = 0
        self._seconds = self._reader_seconds = 0.0
        self._data_size = 1

    def add(self, record: StepRecord) -> None:
        self.num_steps += 1
        self.num_skipped += record.skipped
        self._tokens += record.num_tokens
        self._seconds += record.batch_cost
        self._reader_seconds += record.reader_cost
        self._data_size = record.data_size

    @property
    def batch_cost(self) -> float:
        return self._seconds / self.num_steps

    @property
    def reader_cost(self) -> float:
        return self._reader_seconds / self.num_steps

    @property
    def speed(self) -> float:
        return self.num_steps / self._seconds

    @property
    def ips_total(self) -> float:
        """Tokens per second of the whole job, including tokens that do not count in the loss."""
        return self._tokens / self._seconds

    def rates(self, run: Run) -> dict[str, float]:
        """Return the TFLOP/s and the MFU that correspond to :attr:`ips_total`. The result is empty if the
        FLOPs of the model are unknown."""
        if run.utilization is None:
            return {}
        num_tokens = run.cfg.batch.global_batch_size * run.cfg.Data.Train.dataset.max_seq_len
        return run.utilization.rates(num_tokens / self.ips_total)

    @property
    def ips(self) -> float:
        """Tokens per second of one data-parallel rank."""
        return self.ips_total / self._data_size
