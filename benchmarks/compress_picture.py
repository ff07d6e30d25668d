#!/usr/bin/env python3
"""Draws docs/images/compress.png and prints the table of docs/compress.md, from benchmarks/compress.json.

    python benchmarks/compress_picture.py

A row of that file is one form of a model. Of the quickstart's model: ``quickstart_mb``, bytes of all weights,
and ``perplexity``, as `ppfleetx quantize --samples 20` prints it. Of a GPT-2 of 12 layers of 768:
``gpt2_mb``, bytes of weights that a token reads, and ``tokens_per_cpu_second``, what benchmarks/quantized.py
measures at batch 1. Numbers that were not measured are left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "compress.json"
PICTURE = ROOT / "docs" / "images" / "compress.png"
COLUMNS = {
    "quickstart_mb": ("quickstart, MB", "{:.1f}"),
    "perplexity": ("perplexity", "{:.2f}"),
    "gpt2_mb": ("12 x 768, MB", "{:.0f}"),
    "tokens_per_cpu_second": ("tokens per CPU second", "{:.1f}"),
}


def main() -> None:
    rows = json.loads(ROWS.read_text("utf-8"))["rows"]
    print(table(rows))
    draw([row for row in rows if {"perplexity", "tokens_per_cpu_second"} <= row.keys()])


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    titles = ["", *(title for title, _ in COLUMNS.values()), "change of perplexity"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    whole = rows[0]["perplexity"]
    for row in rows:
        cells = [form.format(row[key]) if key in row else "" for key, (_, form) in COLUMNS.items()]
        change = f"{row['perplexity'] / whole - 1:+.2%}" if "perplexity" in row and row is not rows[0] else ""
        lines.append("| " + " | ".join([row["name"], *cells, change]) + " |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]]) -> None:
    """Change of perplexity against speed."""
    whole = rows[0]["perplexity"]
    figure, axes = plt.subplots(figsize=(7, 3.6))
    names: dict[tuple[float, float], list[str]] = {}  # of what lies at about the same place
    for row in rows:
        place = row["tokens_per_cpu_second"], 100 * (row["perplexity"] / whole - 1)
        axes.scatter(*place, s=row["gpt2_mb"], alpha=0.6)
        near = (at for at in names if abs(at[0] - place[0]) < 1 and abs(at[1] - place[1]) < 0.3)
        names.setdefault(next(near, place), []).append(row["name"])
    above: list[tuple[float, float]] = []  # whose names are; a neighbour's name is put below
    for place, found in sorted(names.items()):
        is_close = any(abs(at[0] - place[0]) < 10 and abs(at[1] - place[1]) < 1 for at in above)
        axes.annotate(
            "\n".join(found),
            place,
            textcoords="offset points",
            xytext=(4, -9) if is_close else (4, 11),
            verticalalignment="top" if is_close else "baseline",
        )
        above += [] if is_close else [place]
    fastest = max(row["tokens_per_cpu_second"] for row in rows)
    axes.set_xlabel("tokens per CPU second (12 layers of 768, one text)")
    axes.set_ylabel("change of perplexity, %")
    axes.set_title("Quality against speed; areas are bytes read for a token")
    axes.set_xlim(10, 1.25 * fastest)
    axes.margins(y=0.3)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
