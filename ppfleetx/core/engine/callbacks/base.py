"""Hooks around the training loop; each concern in a class of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppfleetx.config.sections.root import RunConfig
from ppfleetx.distributed.context import ParallelContext

if TYPE_CHECKING:  # `--check` reads this file, and would wait for all that a run needs
    from ppfleetx.core.engine.run import EvalRecord, Run, StepRecord
from ppfleetx.resilience.spikes import Spike
from ppfleetx.resilience.stragglers import Stragglers


@dataclass(frozen=True)
class CallbackSetup:
    """What a callback is made for.

    Attributes:
        cfg: the run's configuration.
        ctx: this process's place in the job.
        output_dir: the run's directory; it exists, and in training it is the run's own.
        trains: False in ppfleetx eval, which evaluates once.
    """

    cfg: RunConfig
    ctx: ParallelContext
    output_dir: Path
    trains: bool = True


class Callback:
    """Told of a run as it goes on. Does nothing at every hook; subclasses override what they need.

    A callback is made once, as ``Class(setup, **options)`` with a :class:`CallbackSetup` and the options of
    ``Engine.callbacks``, on the ranks that it was registered for (``CallbackTraits.ranks``: rank 0 unless
    said otherwise). Hooks are called in the order of ``Engine.callbacks``, between two steps, and the job
    waits for them. Hooks of a callback that runs on some of the ranks must not communicate.

    A hook that raises a ``UserError`` ends the run with that message and exit code 2, on all ranks and before
    the next step: nothing that was saved is lost. Any other exception is a defect, and ends the process with
    a traceback, and with it the job.
    """

    def on_fit_start(self, run: Run) -> None:
        """Before the first step and the first evaluation, once; ``run.state`` is what was resumed."""

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        """After each optimizer step, also one that was skipped; before its evaluation and its checkpoint."""

    def on_eval_end(self, run: Run, record: EvalRecord) -> None:
        """After each whole evaluation; one that a signal cut short is not reported."""

    def on_spike(self, run: Run, spike: Spike) -> None:
        """After a step that ``Engine.spike`` found to be one. When the run has gone back to a checkpoint
        (``spike.to_step``), ``run.state`` is that of the checkpoint, and :meth:`load_state` was called."""

    def on_stragglers(self, run: Run, found: Stragglers) -> None:
        """After every ``Engine.straggler_freq`` steps over which slow ranks have cost more than 5 %."""

    def on_fit_end(self, run: Run) -> None:
        """Called once however the run ends: finished, stopped or failed. Nothing is saved after it."""

    def state(self) -> Mapping[str, Any]:
        """What a resumed run needs of this callback: JSON values, asked for at every checkpoint on every rank
        where the callback runs. Rank 0's is saved."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave; called before ``on_fit_start``, on every rank where the
        callback runs, whatever the plan of the run that saved it. Not called where the checkpoint has
        none."""
