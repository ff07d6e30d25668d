"""The verb ``plot``."""

from __future__ import annotations

import contextlib
import json
from dataclasses import MISSING, dataclass
from pathlib import Path

from ppfleetx.commands.options import Command, option
from ppfleetx.config.errors import ConfigError, DataError

_PICTURES = (".png", ".svg", ".pdf", ".jpg")


@dataclass(frozen=True, kw_only=True)
class Plot(Command):
    """Draw the loss curves of a run's metrics.jsonl to a PNG."""

    metrics: Path = option("metrics.jsonl of a run", default=MISSING)
    output: Path = option("PNG to write", default=MISSING)

    def run(self) -> None:
        """Draw the picture."""
        refuse_unknown_picture(self.output, "--output")
        draw(read_series(self.metrics), self.output)
        print(f"loss curve: {self.output}")


def refuse_unknown_picture(path: Path, option: str) -> None:
    """Raise ConfigError unless the name says a format of pictures: matplotlib would add .png to it."""
    if path.suffix.lower() not in _PICTURES:
        raise ConfigError(f"must end in {', '.join(_PICTURES)}", key=option, value=path)


def read_series(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    """{"train" | "eval": (steps, losses)} of a metrics file; of named evaluation sets "eval NAME" each.

    A last line that is not whole is left out: the run is writing it, or was killed while it did.

    Raises:
        DataError: there is no such file, it is not a metrics file, or it holds no training step.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such metrics file; a run writes it to its output_dir")
    series: dict[str, tuple[list[int], list[float]]] = {"train": ([], [])}
    *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            _add(series, line)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number} is not a record of a run's metrics") from error
    with contextlib.suppress(ValueError):
        _add(series, rest)
    if not series["train"][0]:
        raise DataError(f"{path}: no training step in it yet")
    return series


def _add(series: dict[str, tuple[list[int], list[float]]], line: str) -> None:
    record = json.loads(line)
    if record["kind"] in ("train", "eval"):
        step, loss = int(record["step"]), float(record["loss"])
        name = f"{record['kind']} {record['set']}" if "set" in record else record["kind"]
        steps, losses = series.setdefault(name, ([], []))
        steps.append(step)
        losses.append(loss)


def draw(series: dict[str, tuple[list[int], list[float]]], output: Path) -> None:
    """Write the picture: training loss thin, evaluation loss as marked points.

    Raises:
        DataError: there is no matplotlib, or ``output`` cannot be written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise DataError("drawing needs matplotlib: pip install 'ppfleetx[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot(*series["train"], linewidth=0.8, label="training")
    for name in sorted(series.keys() - {"train"}):
        axes.plot(*series[name], marker="o", label=name.replace("eval", "evaluation", 1))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(output, dpi=120)
    except OSError as error:
        raise DataError(f"--output {output} cannot be written: {error.strerror}") from error
