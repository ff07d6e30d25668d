"""Event files of TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppfleetx.core.loggers.base import LogStart, LogWriter


class TensorBoard(LogWriter):
    """Writes ``tensorboard/`` in the directory of the run: ``tensorboard --logdir output/tensorboard``.

    A run that goes on adds a file, which tells TensorBoard to leave out what is written of later steps.

    Args:
        output_dir: the directory of the run.
        dir: another directory.
    """

    def __init__(self, output_dir: Path, dir: str | None = None) -> None:
        super().__init__(output_dir)
        self._directory = output_dir / "tensorboard" if dir is None else Path(dir)
        self._writer: Any = None

    def start(self, start: LogStart) -> None:
        from tensorboardX import SummaryWriter

        purge_step = start.step + 1 if start.step else 0
        self._writer = SummaryWriter(str(self._directory), purge_step=purge_step, flush_secs=10)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, global_step=step)

    def finish(self) -> None:
        self._writer.close()
