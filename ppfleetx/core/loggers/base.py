"""The interface of log writers, each of which writes the numbers of a run to one file format or service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LogStart:
    """The facts that a log writer gets when a run starts or resumes.

    Attributes:
        step: the number of steps done so far. A run that resumes from a checkpoint computes the later steps
            again, so the writer must drop its records after this step.
        config: the whole configuration of the run, as JSON values.
    """

    step: int
    config: Mapping[str, Any]


class LogWriter:
    """Base class of log writers, which store the numbers of steps and evaluations by name. A writer is
    created as ``Class(output_dir, **options)``, on rank 0 and only for training. The options come from
    ``Engine.loggers``.

    Open files and import heavy libraries in :meth:`start`, not before. A ``UserError`` raised by any method
    ends the run with its message. An ``OSError`` raised by :meth:`write` is logged once, and training
    continues.
    """

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir

    def start(self, start: LogStart) -> None:
        """Open the file, or connect to the service. Called before the first step. If the run resumes,
        :meth:`load_state` has been called before.
        """
        raise NotImplementedError

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of one step or evaluation, e.g. ``{"train/loss": 2.5, "train/lr": 1e-4}``. All of
        them are finite.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Close the file, or the connection to the service. Called once at the end of the run, even if the
        run fails.
        """

    def state(self) -> Mapping[str, Any]:
        """Return what the writer needs to continue its curves when the run resumes, such as a service's id of
        the run, as JSON values. It is stored in checkpoints.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned when the checkpoint was saved. Called before :meth:`start`."""
