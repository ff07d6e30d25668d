"""Base class of callbacks, whose methods the training loop calls after steps and evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppfleetx.config.sections.root import RunConfig
from ppfleetx.distributed.context import ParallelContext

if TYPE_CHECKING:  # `--check` imports this module, and should not wait for the imports of a run
    from ppfleetx.core.engine.run_view import EvalRecord, Run, StepRecord
from ppfleetx.resilience.loss_spikes import Spike
from ppfleetx.resilience.stragglers import Stragglers


@dataclass(frozen=True)
class CallbackSetup:
    """The first argument of every callback's constructor.

    Attributes:
        output_dir: the output directory, which exists and, during training, is locked.
        trains: False under ``ppfleetx eval``, which only evaluates.
    """

    cfg: RunConfig
    ctx: ParallelContext
    output_dir: Path
    trains: bool = True


class Callback:
    """Base class of callbacks. The training loop calls the ``on_...`` methods, which by default do nothing,
    and waits until they return.

    A callback is created as ``Class(setup, **options)``, with a :class:`CallbackSetup` and the options in
    ``Engine.callbacks``. The order of ``Engine.callbacks`` is the order of the calls. By default, only rank 0
    creates the callback (see ``CallbackTraits.ranks``). Unless it runs on all ranks, it must not communicate
    with other ranks.

    If a method raises a ``UserError`` during training, all ranks end the run before the next step, with that
    message and exit code 2. Any other exception ends the job with a traceback.
    """

    def on_fit_start(self, run: Run) -> None:
        """Called once, before the first step and the first evaluation. In a resumed run, ``run.state``
        already has the progress from the checkpoint."""

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        """Called after each optimizer step, including skipped ones (``record.skipped``), and before the
        evaluation and the checkpoint of that step. Not called if a loss spike in the step stopped the run or
        sent it back to a checkpoint."""

    def on_eval_end(self, run: Run, record: EvalRecord) -> None:
        """Called for each evaluation set, after all sets have been evaluated."""

    def on_spike(self, run: Run, spike: Spike) -> None:
        """Called after a step whose loss or gradient norm is a spike, and before :meth:`on_step_end`. If the
        run went back to a checkpoint, ``run.state`` and the callback's own state have already been
        restored."""

    def on_stragglers(self, run: Run, found: Stragglers) -> None:
        """Called if slow ranks cost the job more than 5 % of the step time, at most every
        ``Engine.straggler_freq`` steps."""

    def on_fit_end(self, run: Run) -> None:
        """Called once when training ends, even if it was stopped or failed. No checkpoint is saved
        afterwards."""

    def state(self) -> Mapping[str, Any]:
        """Return what the callback needs to continue after a resume, as JSON values. Checkpoints store only
        the state of rank 0."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the callback's state from a checkpoint, which may have been saved under another parallel
        plan. Called on every rank where the callback runs, if the checkpoint has a state for it. A resumed
        run calls this before :meth:`on_fit_start`. A run that goes back to a checkpoint after a loss spike
        calls it before :meth:`on_spike`."""
