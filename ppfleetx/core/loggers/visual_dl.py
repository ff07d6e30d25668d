"""VisualDL, PaddlePaddle's viewer of curves."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppfleetx.core.loggers.base import LogStart, LogWriter


def visual_dl_is_installed() -> bool:
    """Whether ``pip install ppfleetx[vdl]`` was done."""
    return importlib.util.find_spec("visualdl") is not None


class VisualDL(LogWriter):
    """Writes ``vdl/`` in the directory of the run; a run that goes on adds a file there.

    Args:
        output_dir: the directory of the run.
        dir: another directory.
    """

    def __init__(self, output_dir: Path, dir: str | None = None) -> None:
        super().__init__(output_dir)
        self._directory = output_dir / "vdl" if dir is None else Path(dir)
        self._writer: Any = None

    def start(self, start: LogStart) -> None:
        from visualdl import LogWriter as Writer

        self._writer = Writer(logdir=str(self._directory))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(tag=name, step=step, value=value)

    def finish(self) -> None:
        self._writer.close()
