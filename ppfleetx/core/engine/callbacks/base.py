"""Hooks around the training loop; each concern in a class of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ppfleetx.core.engine.engine import Engine


@dataclass(frozen=True)
class StepRecord:
    """What is known after an optimizer step.

    Attributes:
        step: 1 for the first step.
        epoch: pass over the training split this step belongs to, from 0.
        batch: index of the step within that pass, from 0.
        loss: global token mean of this step.
        lr: learning rate used in this step.
        weight_decay: weight decay used in this step.
        grad_norm: before clipping.
        num_valid_tokens: tokens that counted in the loss.
        num_tokens: tokens of the whole job in this step, valid or not.
        data_size: replicas that read different samples.
        reader_cost: seconds spent waiting for data.
        batch_cost: seconds of the whole step, waiting included.
        loss_scale: what the loss was multiplied by (float16); None without loss scaling.
        skipped: the gradients overflowed, and nothing was updated.
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
    data_size: int
    reader_cost: float
    batch_cost: float
    loss_scale: float | None = None
    skipped: bool = False


@dataclass(frozen=True)
class EvalRecord:
    """Result of one evaluation after ``step`` steps.

    Attributes:
        loss: mean over ``num_valid_tokens`` (of a classifier: examples).
        ppl: perplexity; None of a classifier.
        metrics: the task's own numbers, by name.
        outputs: of a classifier, ``[examples, outputs]`` in the order of the file.
    """

    step: int
    loss: float
    ppl: float | None
    num_valid_tokens: float
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    outputs: np.ndarray | None = field(default=None, repr=False, compare=False)


class Callback:
    """Does nothing at every hook; subclasses override what they need."""

    def on_fit_start(self, engine: Engine) -> None: ...

    def on_step_end(self, engine: Engine, record: StepRecord) -> None: ...

    def on_eval_end(self, engine: Engine, record: EvalRecord) -> None: ...

    def on_fit_end(self, engine: Engine) -> None:
        """Called once however the run ends: finished, stopped or failed."""
