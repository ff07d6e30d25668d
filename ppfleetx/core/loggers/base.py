"""The interface of log writers, which write the numbers of a run to files or to a tracking service."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LogStart:
    """The state of a run when it starts, resumes, or goes back to a checkpoint, for log writers.

    Attributes:
        step: number of steps done so far. The writer must drop its records after this step.
        config: the whole configuration of the run, as JSON values.
        evaluated_step: step of the last complete evaluation. The writer should drop the records of later
            evaluations, because the run repeats these evaluations.
    """

    step: int
    config: Mapping[str, Any]
    evaluated_step: float = math.inf


class LogWriter:
    """Base class of log writers, which store the numbers of steps and evaluations by name.

    A writer is created on rank 0 as ``Class(output_dir, **options)``, with the options in
    ``Engine.loggers``. Open files and import heavy libraries in :meth:`start`, not before. If a method
    raises a ``UserError``, the run ends with the message of this error. An ``OSError`` from :meth:`write`
    is only logged, once.
    """

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir

    def start(self, start: LogStart) -> None:
        """Open the file or connection. Called before the first step, after any :meth:`load_state`, and again
        after :meth:`finish` if the run goes back to a checkpoint."""
        raise NotImplementedError

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the finite numbers of a step or evaluation, e.g. ``{"train/loss": 2.5, "train/lr":
        1e-4}``."""
        raise NotImplementedError

    def finish(self) -> None:
        """Close the file or connection. Called at the end of the run, even if the run fails, and when the run
        goes back to a checkpoint."""

    def state(self) -> Mapping[str, Any]:
        """Return what the writer needs to continue after a resume, as JSON values. An example is the id of
        the run at a tracking service. Checkpoints store it."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the writer's state from a checkpoint that contains one. A resumed run calls this before
        :meth:`start`. A run that goes back to a checkpoint after a loss spike calls it while the writer is
        open, and then :meth:`finish` and :meth:`start`."""
