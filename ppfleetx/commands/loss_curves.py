"""Read the metrics file of a run (``metrics.jsonl``), and draw its loss curves (``ppfleetx plot``)."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from ppfleetx.commands.options import Command, option
from ppfleetx.config.errors import ConfigError, DataError, UserError

Record = dict[str, Any]
Series = dict[str, tuple[list[int], list[float]]]
"""Curves by name: name -> (steps, values)."""

_PICTURES = (".png", ".svg", ".pdf", ".jpg")


@dataclass(frozen=True, kw_only=True)
class Plot(Command):
    """Draw the loss curves in a run's metrics.jsonl and write them as a picture."""

    metrics: Path = option("metrics.jsonl of a run", default=MISSING)
    output: Path = option("PNG to write", default=MISSING)

    def run(self) -> None:
        check_picture_path(self.output, "--output")
        save_figure(draw_losses(read_records(self.metrics)), self.output, "--output")
        print(f"loss curve: {self.output}")


def read_records(path: Path) -> list[Record]:
    """Read the records of steps and evaluations from a run. ``path`` is its metrics file, or the directory
    that contains the file. An incomplete last line is ignored.

    Raises:
        DataError: there is no such file, a line is not a record, or there is no training step.
    """
    from ppfleetx.core.engine.check_output_dir import METRICS_FILE  # imports NumPy; --help reads this module

    path = path / METRICS_FILE if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"{path}: no such metrics file; a run writes it to its output_dir")
    *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is None:
            raise DataError(f"{path}:{number} is not a record of a run's metrics")
        records.append(record)
    # The last line is incomplete if the run is writing it, or was killed while writing it.
    last = _record(rest)
    records += [] if last is None else [last]
    if not any(record["kind"] == "train" for record in records):
        raise DataError(f"{path}: no training step in it yet")
    return records


def train_records(path: Path) -> list[Record]:
    """Read only the records of training steps from a run: its metrics file, or the directory that contains
    the file. Raises the same errors as :func:`read_records`."""
    return [record for record in read_records(path) if record["kind"] == "train"]


def _record(line: str) -> Record | None:
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        if isinstance(record, dict) and "kind" in record and isinstance(record.get("step"), int):
            has_loss = isinstance(record.get("loss", ""), int | float | None)
            return record if has_loss or record["kind"] not in ("train", "eval") else None
    return None


def number(record: Record, key: str) -> float:
    """Return the value of ``key`` in a record as a float. Null, which stands for a non-finite number, becomes
    NaN."""
    return math.nan if record[key] is None else float(record[key])


def series_of(records: Sequence[Record], key: str) -> Series:
    """Return the curves of the quantity ``key``, such as ``loss``, by name. A curve is (steps, values). The
    training curve is named ``train``. An evaluation curve is named ``eval``, or ``eval NAME`` if the
    evaluation set has a name."""
    series: Series = {}
    for record in records:
        if record["kind"] in ("train", "eval") and key in record:
            name = f"{record['kind']} {record['set']}" if "set" in record else record["kind"]
            steps, values = series.setdefault(name, ([], []))
            steps.append(record["step"])
            values.append(number(record, key))
    return series


def draw_losses(records: Sequence[Record]) -> Any:
    """Return a figure of a run's losses: a thin line for training, a line with markers for each evaluation
    set."""
    figure, axes = import_pyplot().subplots(figsize=(8, 4.5))
    series = series_of(records, "loss")
    axes.plot(*series["train"], linewidth=0.8, label="training")
    for name in sorted(series.keys() - {"train"}):
        axes.plot(*series[name], marker="o", label=name.replace("eval", "evaluation", 1))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def save_figure(figure: Any, output: Path, option: str) -> None:
    """Write a matplotlib figure to the file ``output``, and close it. Error messages mention ``option``, the
    command-line option whose value is the file."""
    figure.tight_layout()
    try:
        figure.savefig(output, dpi=120)
    except OSError as error:
        raise DataError(f"{option} {output} cannot be written: {error.strerror}") from error
    import_pyplot().close(figure)


def import_pyplot() -> Any:
    """Import and return ``pyplot``, without a display. Raises UserError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("drawing needs matplotlib: pip install 'ppfleetx[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_picture_path(path: Path, option: str) -> None:
    """Raise ConfigError if the extension of ``path`` is not .png, .svg, .pdf or .jpg, or if its directory
    does not exist. ``option`` is the command-line option that gave the path."""
    if path.suffix.lower() not in _PICTURES:
        raise ConfigError(f"must end in {', '.join(_PICTURES)}", key=option, value=path)
    if not path.parent.is_dir():
        raise ConfigError("its directory does not exist", key=option, value=path)
