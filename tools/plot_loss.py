#!/usr/bin/env python3
"""Draw the loss curves of a run's metrics.jsonl to a PNG."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ppfleetx.config.errors import DataError
from ppfleetx.utils.cli import run_tool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--metrics", required=True, type=Path, help="metrics.jsonl of a run")
    parser.add_argument("--output", required=True, type=Path, help="PNG to write")
    args = parser.parse_args()
    draw(read_series(args.metrics), args.output)
    print(f"loss curve: {args.output}")


def read_series(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    """{"train" | "eval": (steps, losses)} of a metrics file."""
    if not path.is_file():
        raise DataError(f"{path}: no such metrics file; a run writes it to its output_dir")
    series: dict[str, tuple[list[int], list[float]]] = {"train": ([], []), "eval": ([], [])}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        steps, losses = series[record["kind"]]
        steps.append(record["step"])
        losses.append(record["loss"])
    if not series["train"][0]:
        raise DataError(f"{path}: no training step in it yet")
    return series


def draw(series: dict[str, tuple[list[int], list[float]]], output: Path) -> None:
    """Write the picture: training loss thin, evaluation loss as marked points."""
    try:
        import matplotlib
    except ImportError as error:
        raise DataError("drawing needs matplotlib: pip install 'ppfleetx[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot(*series["train"], linewidth=0.8, label="training")
    if series["eval"][0]:
        axes.plot(*series["eval"], marker="o", label="evaluation")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    run_tool(main)
