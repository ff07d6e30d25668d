"""Scalars for VisualDL, when it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ppfleetx.core.engine.callbacks.base import Callback, CallbackSetup
from ppfleetx.core.engine.run import EvalRecord, Run, StepRecord


def visual_dl_is_installed() -> bool:
    """Whether ``pip install ppfleetx[vdl]`` was done."""
    return importlib.util.find_spec("visualdl") is not None


class VisualDL(Callback):
    """Writes loss, learning rate, gradient norm and speed of each step, and evaluation losses."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer = None

    @classmethod
    def of(cls, setup: CallbackSetup) -> VisualDL | None:
        """For a run that trains where VisualDL is installed."""
        return cls(setup.output_dir / "vdl") if setup.trains and visual_dl_is_installed() else None

    def on_fit_start(self, run: Run) -> None:
        from visualdl import LogWriter

        self._writer = LogWriter(logdir=str(self._directory))

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        for tag, value in (
            ("train/loss", record.loss),
            ("train/learning_rate", record.lr),
            ("train/grad_norm", record.grad_norm),
            ("train/ips_total", record.num_tokens / record.batch_cost),
        ):
            self._writer.add_scalar(tag=tag, step=record.step, value=value)
        if record.loss_scale is not None:
            self._writer.add_scalar(tag="train/loss_scale", step=record.step, value=record.loss_scale)

    def on_eval_end(self, run: Run, record: EvalRecord) -> None:
        self._writer.add_scalar(
            tag="eval/loss" if record.name is None else f"eval/{record.name}/loss",
            step=record.step,
            value=record.loss,
        )

    def on_fit_end(self, run: Run) -> None:
        if self._writer is not None:
            self._writer.close()
