"""What writes the numbers of a run somewhere: one class for each place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LogStart:
    """What a writer is started with.

    Attributes:
        step: steps done; 0 for a run that begins anew. What was written of later steps is of a run that was
            stopped after its last checkpoint, and is written again.
        config: the whole configuration, JSON values.
    """

    step: int
    config: Mapping[str, Any]


class LogWriter:
    """Writes numbers by name. Made as ``Class(output_dir, **options)`` on rank 0 of a run that trains.

    Nothing heavy is imported and nothing is opened before :meth:`start`. A ``UserError`` ends the run in
    words; an ``OSError`` of :meth:`write` is told once, and training goes on.

    Args:
        output_dir: the directory of the run.
    """

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir

    def start(self, start: LogStart) -> None:
        """Open what is written to, before the first step and after :meth:`load_state`."""
        raise NotImplementedError

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the finite numbers of one record, e.g. ``{"train/loss": 2.5, "train/lr": 1e-4}``."""
        raise NotImplementedError

    def finish(self) -> None:
        """Close what :meth:`start` has opened; called once, however the run ends."""

    def state(self) -> Mapping[str, Any]:
        """What the same curves are found by when the run goes on: JSON values, saved in each checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state` gave; called before :meth:`start`."""
