"""The training bar on a terminal."""

from __future__ import annotations

from typing import Literal

from ppfleetx.core.engine.callbacks.base import Callback, CallbackSetup
from ppfleetx.core.engine.run import Run, StepRecord
from ppfleetx.utils.progress import ProgressBar


class TrainProgress(Callback):
    """Steps done of ``max_steps``, time left, and the last loss."""

    def __init__(self, show: bool | Literal["auto"]) -> None:
        self._show = show
        self._bar: ProgressBar | None = None

    @classmethod
    def of(cls, setup: CallbackSetup) -> TrainProgress | None:
        """For a run that trains."""
        return cls(setup.cfg.Engine.progress_bar) if setup.trains else None

    def on_fit_start(self, run: Run) -> None:
        self._bar = ProgressBar(
            "training", total=run.max_steps, completed=run.state.step, unit="step", show=self._show
        )
        self._bar.__enter__()

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        self._bar.advance(1, f"loss {record.loss:.4f}")

    def on_fit_end(self, run: Run) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
