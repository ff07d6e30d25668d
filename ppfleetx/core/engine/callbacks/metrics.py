"""``metrics.jsonl``: every logged step and evaluation in full precision."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

from ppfleetx.core.engine.callbacks.base import CallbackSetup
from ppfleetx.core.engine.callbacks.records import Recorder
from ppfleetx.core.engine.run import Run
from ppfleetx.core.engine.run_directory import METRICS_FILE
from ppfleetx.core.engine.spikes import Spike
from ppfleetx.core.engine.stragglers import Stragglers
from ppfleetx.utils.files import atomic_write, put_aside
from ppfleetx.utils.log import get_logger


class MetricsFile(Recorder):
    """Appends one JSON object a line.

    On resume, lines later than the step resumed from are dropped first, so that the file always reads
    like that of a run that was never interrupted. A run that starts anew puts a file that is there aside.
    """

    def __init__(self, path: Path, logging_freq: int) -> None:
        super().__init__(logging_freq)
        self._path = path

    @classmethod
    def of(cls, setup: CallbackSetup) -> MetricsFile | None:
        """For a run that trains; beside its checkpoints."""
        if not setup.trains:
            return None
        return cls(setup.output_dir / METRICS_FILE, setup.cfg.Engine.logging_freq)

    def on_fit_start(self, run: Run) -> None:
        if run.state.step:
            self._forget(run.state.step, consumed=run.state.consumed_samples)
        elif self._path.exists():
            get_logger().info(f"the metrics of an earlier run are now {put_aside(self._path)}")

    def on_spike(self, run: Run, spike: Spike) -> None:
        super().on_spike(run, spike)
        if spike.to_step is not None:  # what came after that checkpoint has not happened
            self._forget(spike.to_step)
        told = spike.to_json()
        at_step = told.pop("step")
        step = at_step if spike.to_step is None else spike.to_step
        self.keep({"kind": "spike", "step": step, "at_step": at_step, **told})

    def on_stragglers(self, run: Run, found: Stragglers) -> None:
        self.keep({"kind": "stragglers", **found.to_json()})

    def _forget(self, step: int, *, consumed: float = math.inf) -> None:
        """:func:`keep_until`; a full disk ends no training here either."""
        try:
            keep_until(self._path, step, consumed=consumed)
        except OSError as error:
            get_logger().error(
                f"{self._path} still has what came after global step {step}, which counts no more: "
                f"{error.strerror}"
            )

    def keep(self, record: dict[str, Any]) -> None:
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


def keep_until(path: Path, step: int, *, consumed: float = math.inf) -> None:
    """Drop records later than ``step`` and a line torn by a kill.

    Args:
        consumed: samples that have been used at that step. A spike in later ones, which has sent the run back
            to that step, is dropped as well: a run that resumes there meets it again.
    """
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if _has_happened(line, step, consumed)]
    if kept != lines:
        with atomic_write(path, "w") as file:
            file.write("".join(f"{line}\n" for line in kept))


def _has_happened(line: str, step: int, consumed: float) -> bool:
    """Whether it is a whole record of what came before ``step`` ended, and no spike in samples after it."""
    try:
        record = json.loads(line)
        at_step = record["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return False
    samples = record.get("samples") if record.get("kind") == "spike" else None
    return at_step <= step and (not samples or samples[0] < consumed)
