"""``metrics.jsonl``: every logged step and evaluation in full precision."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

from ppfleetx.core.engine.callbacks.base import Callback, CallbackSetup
from ppfleetx.core.engine.callbacks.window import Window
from ppfleetx.core.engine.run import EvalRecord, Run, StepRecord
from ppfleetx.core.engine.run_directory import METRICS_FILE
from ppfleetx.core.engine.spikes import Spike
from ppfleetx.core.engine.stragglers import Stragglers
from ppfleetx.utils.files import atomic_write, put_aside
from ppfleetx.utils.log import get_logger


class MetricsFile(Callback):
    """Appends one JSON object a line.

    On resume, lines later than the step resumed from are dropped first, so that the file always reads
    like that of a run that was never interrupted. A run that starts anew puts a file that is there aside.
    """

    def __init__(self, path: Path, logging_freq: int) -> None:
        self._path, self._logging_freq = path, logging_freq
        self._window = Window()

    @classmethod
    def of(cls, setup: CallbackSetup) -> MetricsFile | None:
        """For a run that trains; beside its checkpoints."""
        if not setup.trains:
            return None
        return cls(setup.output_dir / METRICS_FILE, setup.cfg.Engine.logging_freq)

    def on_fit_start(self, run: Run) -> None:
        if run.state.step:
            keep_until(self._path, run.state.step)
        elif self._path.exists():
            get_logger().info(f"the metrics of an earlier run are now {put_aside(self._path)}")

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        self._window.add(record)
        if record.step % self._logging_freq and record.step != run.max_steps:
            return
        self._append(
            {
                "kind": "train",
                "step": record.step,
                "epoch": record.epoch,
                "loss": _number(record.loss),
                "lr": record.lr,
                "weight_decay": record.weight_decay,
                "grad_norm": _number(record.grad_norm),
                "tokens": record.num_valid_tokens,
                "consumed_samples": run.state.consumed_samples,
                "reader_cost": self._window.reader_cost,
                "batch_cost": self._window.batch_cost,
                "ips_total": self._window.ips_total,
                "ips": self._window.ips,
                **_scaling(record, run.state.skipped_steps),
                **_sources(record),
            }
        )
        self._window = Window()

    def on_spike(self, run: Run, spike: Spike) -> None:
        if spike.to_step is not None:  # what came after that checkpoint has not happened
            keep_until(self._path, spike.to_step)
            self._window = Window()
        told = spike.to_json()
        at_step = told.pop("step")
        step = at_step if spike.to_step is None else spike.to_step
        self._append({"kind": "spike", "step": step, "at_step": at_step, **told})

    def on_stragglers(self, run: Run, found: Stragglers) -> None:
        self._append({"kind": "stragglers", **found.to_json()})

    def on_eval_end(self, run: Run, record: EvalRecord) -> None:
        self._append(
            {
                "kind": "eval",
                "step": record.step,
                **({} if record.name is None else {"set": record.name}),
                "loss": _number(record.loss),
                **({"metrics": dict(record.metrics)} if record.ppl is None else {"ppl": _number(record.ppl)}),
                "examples" if record.ppl is None else "tokens": record.num_valid_tokens,
                "seconds": record.seconds,
            }
        )

    def _append(self, record: dict[str, Any]) -> None:
        """Add a whole line or nothing: a full disk ends no training, unless by its checkpoints."""
        line = (json.dumps(record) + "\n").encode()
        try:
            # Opened for each line: a killed run leaves whole lines, and nothing to close.
            with self._path.open("ab", buffering=0) as file:
                start = file.seek(0, os.SEEK_END)
                if file.write(line) != len(line):
                    file.truncate(start)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            get_logger().error(f"global step {record['step']} is not in {self._path}: {error.strerror}")


def _number(value: float) -> float | None:
    """JSON knows neither infinity nor NaN: they are null."""
    return value if math.isfinite(value) else None


def _scaling(record: StepRecord, skipped_steps: int) -> dict[str, Any]:
    if record.loss_scale is None:
        return {}
    return {
        "loss_scale": record.loss_scale,
        "found_inf": int(record.skipped),
        "skipped_steps": skipped_steps,
    }


def _sources(record: StepRecord) -> dict[str, Any]:
    if not record.sources:
        return {}
    told = record.sources.items()
    return {"sources": {k: {"loss": _number(s.loss), "tokens": s.num_valid_tokens} for k, s in told}}


def keep_until(path: Path, step: int) -> None:
    """Drop records later than ``step`` and a line torn by a kill."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if _step_of(line) <= step]
    if kept != lines:
        with atomic_write(path, "w") as file:
            file.write("".join(f"{line}\n" for line in kept))


def _step_of(line: str) -> float:
    """The record's step; infinity for a torn line, which is thus dropped."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")
