"""Writers of local files: a CSV table, and event files of TensorBoard and VisualDL."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ppfleetx.core.loggers.base import LogStart, LogWriter
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.output_files import atomic_write, put_aside

CSV_FILE = "metrics.csv"


class CsvFile(LogWriter):
    """Writes ``metrics.csv``, with a row for each logged step or evaluation and a column for each number. A
    resumed run drops the rows after the step of its checkpoint. A new run renames an existing
    ``metrics.csv``."""

    def __init__(self, output_dir: Path) -> None:
        super().__init__(output_dir)
        self._path, self._columns = output_dir / CSV_FILE, ["step"]

    def start(self, start: LogStart) -> None:
        if not self._path.exists():
            return
        if start.step == 0:
            get_logger().info(f"renamed the table of an earlier run to {put_aside(self._path)}")
            return
        last = min(start.step, start.evaluated_step)
        rows = [row for row in self._rows() if _step_of(row) <= (last if _is_evaluation(row) else start.step)]
        self._rewrite(rows)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        row = {"step": str(step), **{name: repr(value) for name, value in numbers.items()}}
        new = [name for name in row if name not in self._columns]
        if new or not self._path.exists():
            rows = self._rows() if self._path.exists() else []
            self._columns += new
            self._rewrite([*rows, row])
            return
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(row)

    def _rows(self) -> list[dict[str, str]]:
        with self._path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            self._columns = list(dict.fromkeys([*self._columns, *(reader.fieldnames or ())]))
        return rows

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        with atomic_write(self._path, "w") as file:
            writer = csv.DictWriter(file, self._columns, restval="", lineterminator="\r\n")
            writer.writeheader()
            writer.writerows(rows)


def _step_of(row: Mapping[str, str | None]) -> float:
    """Return the step of a row of ``metrics.csv``; infinity for an incomplete row, which a resumed run
    drops."""
    text = row.get("step") or ""
    return int(text) if text.isascii() and text.isdigit() and None not in row.values() else float("inf")


def _is_evaluation(row: Mapping[str, str | None]) -> bool:
    return any(text and name.startswith("eval/") for name, text in row.items() if name)


class _EventFiles(LogWriter):
    """Base class of log writers that write event files to ``dir`` or, if ``dir`` is None, to ``folder`` in
    the output directory."""

    folder: ClassVar[str]

    def __init__(self, output_dir: Path, dir: str | None = None) -> None:
        super().__init__(output_dir)
        self._directory = str(output_dir / self.folder if dir is None else dir)
        self._writer: Any = None

    def finish(self) -> None:
        self._writer.close()


class TensorBoard(_EventFiles):
    """Writes event files for TensorBoard to ``tensorboard/`` in the output directory. After a resume,
    TensorBoard ignores the earlier records of steps after the checkpoint."""

    folder = "tensorboard"

    def start(self, start: LogStart) -> None:
        from tensorboardX import SummaryWriter

        purge_step = start.step + 1 if start.step else 0
        self._writer = SummaryWriter(self._directory, purge_step=purge_step, flush_secs=10)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, global_step=step)


class VisualDL(_EventFiles):
    """Writes event files for VisualDL to ``vdl/`` in the output directory. A resumed run adds another
    file."""

    folder = "vdl"

    def start(self, start: LogStart) -> None:
        from visualdl import LogWriter as Writer

        self._writer = Writer(logdir=self._directory)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(tag=name, step=step, value=value)
