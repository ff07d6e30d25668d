"""The numbers of a run as a table."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from ppfleetx.core.loggers.base import LogStart, LogWriter
from ppfleetx.utils.files import atomic_write, put_aside
from ppfleetx.utils.log import get_logger

CSV_FILE = "metrics.csv"


class CsvFile(LogWriter):
    """Writes ``metrics.csv`` in the directory of the run: a row for each record, ``step`` and a column for
    each number. A number of a new name makes the file anew with one column more.

    A run that goes on drops rows of later steps; one that begins anew puts a file that is there aside.
    """

    def __init__(self, output_dir: Path) -> None:
        super().__init__(output_dir)
        self._path, self._columns = output_dir / CSV_FILE, ["step"]

    def start(self, start: LogStart) -> None:
        if not self._path.exists():
            return
        if start.step == 0:
            get_logger().info(f"the table of an earlier run is now {put_aside(self._path)}")
            return
        rows = [row for row in self._rows() if _step_of(row) <= start.step]
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
    """The row's step; infinity for a row torn by a kill, which is thus dropped."""
    text = row.get("step") or ""
    return int(text) if text.isascii() and text.isdigit() and None not in row.values() else float("inf")
