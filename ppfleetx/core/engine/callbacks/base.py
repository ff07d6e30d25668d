"""Hooks around the training loop."""

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
    """The arguments for creating a callback. ``output_dir`` exists and, during training, belongs to the
    run; ``trains`` is False in ppfleetx eval, which only evaluates."""

    cfg: RunConfig
    ctx: ParallelContext
    output_dir: Path
    trains: bool = True


class Callback:
    """Hooks that are called during a run. They do nothing here; subclasses override the hooks they need.

    A callback is created once, as ``Class(setup, **options)`` with a :class:`CallbackSetup` and the options
    of ``Engine.callbacks``, on the ranks it is registered for (``CallbackTraits.ranks``; by default rank 0).
    Hooks are called between two steps in the order of ``Engine.callbacks``, and the job waits for them. A
    callback that does not run on all ranks must not communicate.

    A hook that raises a ``UserError`` ends the run before the next step, on all ranks, with that message and
    exit code 2; nothing that was saved is lost. Any other exception is a bug: the process ends with a
    traceback, and the job with it.
    """

    def on_fit_start(self, run: Run) -> None:
        """Called once, before the first step and the first evaluation; ``run.state`` is already restored."""

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        """Called after each optimizer step, skipped ones included, before its evaluation and checkpoint."""

    def on_eval_end(self, run: Run, record: EvalRecord) -> None:
        """Called after each complete evaluation."""

    def on_spike(self, run: Run, spike: Spike) -> None:
        """Called after a step that ``Engine.spike`` judged a spike. If the run went back to a checkpoint
        (``spike.to_step``), ``run.state`` is the checkpoint's, and :meth:`load_state` has been called."""

    def on_stragglers(self, run: Run, found: Stragglers) -> None:
        """Called every ``Engine.straggler_freq`` steps if slow ranks cost more than 5 % of their time."""

    def on_fit_end(self, run: Run) -> None:
        """Called once at the end, whether the run finished, stopped or failed. Nothing is saved later."""

    def state(self) -> Mapping[str, Any]:
        """The state to save in each checkpoint, as JSON values. Called on every rank where the callback runs;
        rank 0's state is saved."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state`. Called before ``on_fit_start`` on every rank where the
        callback runs, whatever the plan of the run that saved it; not called if the checkpoint has no state
        for it.
        """
