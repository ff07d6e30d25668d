#!/usr/bin/env python3
"""Whether the best learning rate stays the same over widths, with `Model.mup_base_width` and without.

    make quickstart/data/stdlib_text_document.idx
    python benchmarks/mup.py [--widths 64 128 256 512] [--steps 120] [--output mup.png]

Models of 2 blocks with heads of 32 train on the quickstart's data at a constant rate; what is compared is the
mean loss of the last 20 steps. One thread each, two runs at a time.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import TINY, pyplot, records_of_run

LAST = 20


def final_loss(width: int, rate: float, base: int | None, steps: int, std: float = 0.02) -> float:
    """The mean loss of the last steps; infinite if the run diverged."""
    keys = {
        "Engine.max_steps": steps,
        "Engine.eval_freq": 0,
        "Model.hidden_size": width,
        "Model.num_layers": 2,
        "Model.num_attention_heads": width // 32,
        "Model.mup_base_width": "null" if base is None else base,
        "Model.initializer_range": 0.02 if base is None else std,
        "Data.Train.dataset.max_seq_len": 128,
        "Data.Eval": "null",
        "Optimizer.name": "AdamW",  # the only one with rules for the width
        "Optimizer.lr.decay_style": "constant",
        "Optimizer.lr.warmup_steps": 10,
        "Optimizer.lr.max_lr": rate,
        "Optimizer.lr.min_lr": 0,
    }
    records = records_of_run(TINY, keys, one_thread=True)
    if records is None:
        return float("inf")
    losses = [record["loss"] for record in records if "loss" in record]
    return statistics.mean(losses[-LAST:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--exponents", type=int, nargs="+", default=[-10, -9, -8, -7, -6, -5, -4])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument(
        "--initializer-range", type=float, default=0.02, help="of the models with muP (default: 0.02)"
    )
    parser.add_argument("--output", type=Path, help="picture to write")
    args = parser.parse_args()
    runs = [
        (base, width, exponent)
        for base in (None, args.widths[0])
        for width in args.widths
        for exponent in args.exponents
    ]

    def run(one: tuple[int | None, int, int]) -> float:
        base, width, exponent = one
        loss = final_loss(width, 2.0**exponent, base, args.steps, args.initializer_range)
        print(f"{'muP' if base else 'standard':8} width {width:4} rate 2^{exponent}: {loss:.3f}", flush=True)
        return loss

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(runs, pool.map(run, runs), strict=True))
    for base in (None, args.widths[0]):
        for width in args.widths:
            losses = {exponent: found[base, width, exponent] for exponent in args.exponents}
            best = min(losses, key=losses.get)
            name = "muP" if base else "standard"
            print(f"{name}: width {width}: best rate 2^{best}, loss {losses[best]:.3f}")
    if args.output is not None:
        draw(args, found)


def draw(args: argparse.Namespace, found: dict[tuple[int | None, int, int], float]) -> None:
    """Loss against rate, one line for each width, without and with muP."""
    figure, places = pyplot().subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for place, base in zip(places, (None, args.widths[0]), strict=True):
        for width in args.widths:
            losses = [found[base, width, exponent] for exponent in args.exponents]
            place.plot([2.0**e for e in args.exponents], losses, marker="o", label=f"width {width}")
        place.set(xscale="log", xlabel="learning rate", title="mup_base_width: 64" if base else "without muP")
    places[0].set(ylabel=f"loss, mean of steps {args.steps - LAST + 1} to {args.steps}")
    places[0].legend()
    figure.tight_layout()
    figure.savefig(args.output, dpi=110)


if __name__ == "__main__":
    main()
