"""Hooks for the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppfleetx.config.sections.root import RunConfig
from ppfleetx.distributed.context import ParallelContext

if TYPE_CHECKING:  # `--check` reads this file, and should not wait for the imports of a run
    from ppfleetx.core.engine.run import EvalRecord, Run, StepRecord
from ppfleetx.resilience.loss_spikes import Spike
from ppfleetx.resilience.stragglers import Stragglers


@dataclass(frozen=True)
class CallbackSetup:
    """The arguments for creating a callback. ``output_dir`` exists and, during training, belongs to the run.
    ``trains`` is False in ppfleetx eval, which only evaluates."""

    cfg: RunConfig
    ctx: ParallelContext
    output_dir: Path
    trains: bool = True


class Callback:
    """Base class of callbacks. Hooks are called during a run and do nothing by default; subclasses override
    the hooks they need.

    A callback is created once, as ``Class(setup, **options)`` with a :class:`CallbackSetup` and the options
    of ``Engine.callbacks``, on the ranks it is registered for (``CallbackTraits.ranks``; by default rank 0).
    Hooks are called between steps in the order of ``Engine.callbacks``, and the job waits for them. A
    callback that does not run on all ranks must not communicate.

    If a hook raises a ``UserError``, the run ends before the next step, on all ranks, with that message and
    exit code 2; saved checkpoints are kept. Any other exception is treated as a bug: the job ends with a
    traceback.
    """

    def on_fit_start(self, run: Run) -> None:
        """Called once, before the first step and the first evaluation. ``run.state`` is already restored."""

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        """Called after each optimizer step, including skipped ones, before its evaluation and checkpoint."""

    def on_eval_end(self, run: Run, record: EvalRecord) -> None:
        """Called after each complete evaluation."""

    def on_spike(self, run: Run, spike: Spike) -> None:
        """Called after a step that ``Engine.spike`` classified as a spike. If the run went back to a
        checkpoint (``spike.to_step``), ``run.state`` is that of the checkpoint, and :meth:`load_state` has
        been called."""

    def on_stragglers(self, run: Run, found: Stragglers) -> None:
        """Called every ``Engine.straggler_freq`` steps if slow ranks cost the job more than 5 % of the step
        time."""

    def on_fit_end(self, run: Run) -> None:
        """Called once at the end, whether the run finished, stopped or failed. Nothing is saved
        afterwards."""

    def state(self) -> Mapping[str, Any]:
        """Return the state to save in each checkpoint, as JSON values. Called on every rank where the
        callback runs; the state of rank 0 is saved."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state`. Called before ``on_fit_start`` on every rank where the
        callback runs, even if the checkpoint was saved with another plan. Not called if the checkpoint has no
        state for this callback."""
