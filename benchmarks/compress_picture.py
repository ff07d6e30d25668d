#!/usr/bin/env python3
"""Draws docs/images/compress.png from the numbers in the tables of docs/compress.md.

    python benchmarks/compress_picture.py

Speed is that of benchmarks/quantized.py, batch 1; perplexity that of the quickstart model.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "compress.png"
# name, tokens per CPU second, change of perplexity in per cent, bytes per weight of the whole model
POINTS = (
    ("float32", 15.1, 0.0, 494),
    ("int8", 28.8, 0.018, 124),
    ("W8A8", 35.6, 0.043, 124),
    ("int4, nearest", 35.8, 0.011, 84),
    ("int4, GPTQ", 35.8, 0.107, 84),
)


def main() -> None:
    figure, axes = plt.subplots(figsize=(7, 3.6))
    for name, speed, change, megabytes in POINTS:
        axes.scatter(speed, change, s=megabytes, alpha=0.6)
        axes.annotate(name, (speed, change), textcoords="offset points", xytext=(9, 5))
    axes.set_xlabel("tokens per CPU second (12 layers of 768, one text)")
    axes.set_ylabel("change of perplexity, %")
    axes.set_title("Quality against speed; areas are bytes read for a token")
    axes.set_xlim(10, 42)
    axes.margins(y=0.3)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
