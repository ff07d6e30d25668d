#!/usr/bin/env python3
"""Draws docs/images/compress.png and prints the tables of docs/numerics.md, from benchmarks/compress.json.

    python benchmarks/compress_picture.py

benchmarks/compress_quality.py measures the numbers. Those that were not measured are left out.
"""

from __future__ import annotations

import json
from typing import Any

from harness import ROOT, pyplot

NUMBERS = ROOT / "benchmarks" / "compress.json"
PICTURE = ROOT / "docs" / "images" / "compress.png"
COLUMNS = {
    "mb": ("MB", "{:.1f}"),
    "perplexity": ("perplexity", "{:.2f}"),
    "change": ("change", "{:+.2%}"),
    "output_error": ("error of a layer", "{:.2%}"),
    "tokens_per_cpu_second": ("tokens per CPU second", "{:.0f}"),
    "times_float32": ("over float32", "{:.2f}"),
}
LEARNED = 8.0
DRAWN = ("change", "times_float32")
COLOURS = {"float32": "#333333", "pruned": "#b35900", "int4": "#0b6e4f", "int8": "#1f5fa8", "W8A8": "#1f5fa8"}

Rows = dict[str, dict[str, float]]


def main() -> None:
    models = json.loads(NUMBERS.read_text("utf-8"))["models"]
    drawn = {}
    for name, model in models.items():
        rows = with_change(model["rows"])
        print(f"{name}: {model['about']}\n\n{table(rows)}\n")
        has_learned = rows["float32"]["loss"] < LEARNED  # what guesses at random has no quality to lose
        if has_learned and all(key in row for row in rows.values() for key in DRAWN):
            drawn[model["about"]] = rows
    draw(drawn)


def with_change(rows: Rows) -> Rows:
    """With the change of perplexity against float32, as a share."""
    whole = rows["float32"]["perplexity"]
    return {form: {**row, "change": row["perplexity"] / whole - 1} for form, row in rows.items()}


def table(rows: Rows) -> str:
    """The rows as Markdown."""
    columns = {key: value for key, value in COLUMNS.items() if any(key in row for row in rows.values())}
    lines = [
        "| | " + " | ".join(title for title, _ in columns.values()) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for form, row in rows.items():
        empty = {"change", "times_float32"} if form == "float32" else ()
        cells = [
            text.format(row[key]) if key in row and key not in empty else ""
            for key, (_, text) in columns.items()
        ]
        lines.append("| " + " | ".join([form, *cells]) + " |")
    return "\n".join(lines)


def draw(models: dict[str, Rows]) -> None:
    """Change of perplexity against speed, a panel for each model."""
    figure, panels = pyplot().subplots(1, len(models), figsize=(4.6 * len(models) + 1, 4), squeeze=False)
    for axes, (about, rows) in zip(panels[0], models.items(), strict=True):
        _draw_panel(axes, rows)
        axes.set_title(about, fontsize=10)
        axes.set_xlabel("tokens per CPU second, over float32 (one text, one thread)")
    panels[0][0].set_ylabel("change of perplexity, %")
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


def _draw_panel(axes: Any, rows: Rows) -> None:
    """Points, and aslant beside them their names, together where points lie in one place."""
    points = {form: (row["times_float32"], 100 * row["change"]) for form, row in rows.items()}
    xs, ys = zip(*points.values(), strict=True)
    width, height = max(xs) - min(xs), max(ys) - min(ys)
    axes.set_xlim(min(xs) - 0.1 * width, max(xs) + 0.35 * width)
    axes.set_ylim(min(ys) - 0.15 * height, max(ys) + 0.4 * height)
    names: dict[tuple[float, float], list[str]] = {}
    for form, (x, y) in points.items():
        axes.scatter(
            [x], [y], s=160 * rows[form]["mb"] / rows["float32"]["mb"], color=_colour(form), alpha=0.7
        )
        near = (at for at in names if abs(at[0] - x) < 0.01 * width and abs(at[1] - y) < 0.03 * height)
        names.setdefault(next(near, (x, y)), []).append(form)
    for place, found in names.items():
        below = any(
            0 < place[0] - at[0] < 0.05 * width and abs(at[1] - place[1]) < 0.05 * height for at in names
        )
        axes.annotate(
            " / ".join(found),
            place,
            textcoords="offset points",
            xytext=(4, -5) if below else (4, 5),
            rotation=-25 if below else 25,
            rotation_mode="anchor",
            verticalalignment="top" if below else "baseline",
            fontsize=8.5,
            color=_colour(found[0]),
        )
    axes.grid(alpha=0.3)


def _colour(form: str) -> str:
    return next(colour for key, colour in COLOURS.items() if key in form)


if __name__ == "__main__":
    main()
