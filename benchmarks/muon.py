#!/usr/bin/env python3
"""How many steps Muon needs to reach the loss that AdamW ends with, each with its best learning rate.

    make quickstart/data/stdlib_text_document.idx
    python benchmarks/muon.py [--seeds 3] [--shares 0.4 0.5] [--output muon.png]

Both train the quickstart's model. Rates are tried with the first seed and half of the steps; then every seed
trains with the best one, and Muon also for a share of the steps, with its schedule fitted to them. What is
compared is the last evaluation loss.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from harness import TINY, pyplot, records_of_run

RATES = {"AdamW": (5e-4, 1e-3, 2e-3, 4e-3), "Muon": (4e-3, 8e-3, 16e-3)}


class Run(NamedTuple):
    loss: float  # of the evaluation after the last step
    seconds: float  # of one step, the median
    curve: list[tuple[int, float]]  # evaluation losses by step


def train(optimizer: str, rate: float, seed: int, steps: int, overrides: list[str]) -> Run:
    """One run of the quickstart's model."""
    keys = {
        "Global.seed": seed,
        "Engine.max_steps": steps,
        "Engine.eval_freq": max(1, steps // 5),
        "Engine.eval_iters": 20,
        "Optimizer.name": optimizer,
        "Optimizer.lr.max_lr": rate,
        "Optimizer.lr.min_lr": rate / 80,
    }
    rows = records_of_run(TINY, keys, overrides)
    if rows is None:
        raise SystemExit(f"{optimizer} diverged at rate {rate}")
    curve = [(row["step"], row["loss"]) for row in rows if row["kind"] == "eval"]
    return Run(
        curve[-1][1], statistics.median(row["batch_cost"] for row in rows if row["kind"] == "train"), curve
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=380)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.4, 0.5],
        help="of the steps, for Muon (default: 0.4 0.5)",
    )
    parser.add_argument("--output", type=Path, help="picture to write")
    parser.add_argument(
        "-o", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="of the configuration"
    )
    args = parser.parse_args()
    one = partial(train, overrides=args.overrides)

    best, full = {}, {}
    for optimizer, rates in RATES.items():
        found = {}
        for rate in rates:
            found[rate] = one(optimizer, rate, seed=1, steps=args.steps // 2).loss
            print(f"{optimizer:5} rate {rate}, {args.steps // 2} steps: {found[rate]:.4f}", flush=True)
        best[optimizer] = min(found, key=found.get)
        full[optimizer] = [
            one(optimizer, best[optimizer], seed, args.steps) for seed in range(1, args.seeds + 1)
        ]
        losses = [run.loss for run in full[optimizer]]
        seconds = statistics.median(run.seconds for run in full[optimizer])
        print(f"{optimizer:5} rate {best[optimizer]}: {say(losses)}, {seconds:.3f} s a step", flush=True)
    points = []
    for share in args.shares:
        steps = round(share * args.steps)
        losses = [one("Muon", best["Muon"], seed, steps).loss for seed in range(1, args.seeds + 1)]
        points.append((steps, statistics.mean(losses)))
        print(f"Muon, {steps} steps ({share:.0%}): {say(losses)}", flush=True)
    points.append((args.steps, statistics.mean(run.loss for run in full["Muon"])))
    goal = statistics.mean(run.loss for run in full["AdamW"])
    steps = steps_to(goal, sorted(points))
    if steps is None:
        few, low = min(points)
        print(f"Muon reaches {low:.4f} with {few / args.steps:.2f} of the steps, AdamW {goal:.4f} with all")
    else:
        print(f"Muon needs {steps / args.steps:.2f} of the steps to AdamW's {goal:.4f}")
    if args.output is not None:
        draw(args.output, full)


def say(losses: list[float]) -> str:
    """The mean of some losses and all of them."""
    return f"mean {statistics.mean(losses):.4f} ({', '.join(f'{loss:.4f}' for loss in losses)})"


def steps_to(goal: float, points: list[tuple[int, float]]) -> float | None:
    """The steps to the loss `goal`, on the line between two measured points; None outside of them."""
    for (few, high), (many, low) in pairwise(points):
        if high >= goal >= low:
            return few + (many - few) * (high - goal) / (high - low)
    return None


def draw(output: Path, full: dict[str, list[Run]]) -> None:
    """Evaluation loss against steps, a line for each optimizer and seed."""
    figure, place = pyplot().subplots(figsize=(6, 3.6))
    for color, (optimizer, runs) in zip(("C0", "C1"), full.items(), strict=True):
        for index, run in enumerate(runs):
            place.plot(*zip(*run.curve, strict=True), color=color, label=None if index else optimizer)
    place.set(xlabel="step", ylabel="evaluation loss")
    place.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    main()
