"""Hooks around the training loop; each concern in a class of its own."""

from __future__ import annotations

from ppfleetx.core.engine.run import EvalRecord, Run, StepRecord


class Callback:
    """Does nothing at every hook; subclasses override what they need."""

    def on_fit_start(self, run: Run) -> None: ...

    def on_step_end(self, run: Run, record: StepRecord) -> None: ...

    def on_eval_end(self, run: Run, record: EvalRecord) -> None: ...

    def on_fit_end(self, run: Run) -> None:
        """Called once however the run ends: finished, stopped or failed."""
