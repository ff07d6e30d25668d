"""The interface of log writers: one class for each file format or service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LogStart:
    """The number of steps done so far, and the whole configuration as JSON values.

    A run that resumes from a checkpoint repeats later steps, so a writer must drop its records after
    ``step``.
    """

    step: int
    config: Mapping[str, Any]


class LogWriter:
    """Writes numbers by name. Created as ``Class(output_dir, **options)`` on rank 0, for training only.

    Do not import heavy libraries or open files before :meth:`start`. A ``UserError`` ends the run with its
    message. An ``OSError`` from :meth:`write` is logged once, and training continues.
    """

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir

    def start(self, start: LogStart) -> None:
        """Open the file or service. Called before the first step and after :meth:`load_state`."""
        raise NotImplementedError

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the finite numbers of one record, e.g. ``{"train/loss": 2.5, "train/lr": 1e-4}``."""
        raise NotImplementedError

    def finish(self) -> None:
        """Close the file or service that :meth:`start` opened. Called once, however the run ends."""

    def state(self) -> Mapping[str, Any]:
        """Return the state needed to continue the curves when the run resumes, as JSON values. Saved in
        checkpoints."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state`. Called before :meth:`start`."""
