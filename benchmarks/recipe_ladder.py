#!/usr/bin/env python3
"""Whether the learning rates of `ppfleetx recipe` are good at each depth, and the losses on one curve.

    make quickstart/data/stdlib_text_document.idx
    python benchmarks/recipe_ladder.py [--tokens-per-param 0.03] [--output ladder.png]

Each depth trains on the quickstart's data as its recipe says, with the recipe's learning rate and with others
beside it, on sequences of 256 tokens. The evaluation loss after the last step is compared. A run uses one
thread.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import yaml
from harness import pyplot, records_of_run

from ppfleetx.planner.recipe import RecipeInputs, recipe

DATASET = {"input_dir": "quickstart/data/stdlib_text_document", "split": "95,5,0", "max_seq_len": 256}


def final_loss(inputs: RecipeInputs, factor: float) -> float:
    """The evaluation loss after the last step of the recipe, with the quickstart's data and ``factor`` times
    its learning rate; infinite if the run diverged."""
    values = recipe(inputs).values
    rate = factor * inputs.learning_rate
    values["Engine"] |= {
        "eval_freq": inputs.steps,
        "eval_iters": max(1, 256 // inputs.batch),  # sequences: the same for every depth
        "mix_precision": {"enable": "auto", "dtype": "bfloat16"},
    }
    values["Data"] = {"Train": {"dataset": DATASET}, "Eval": {"dataset": DATASET}}
    values["Optimizer"]["lr"] |= {"max_lr": rate, "min_lr": rate / 10}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
        yaml.safe_dump(values, config)
        config.flush()
        records = records_of_run(Path(config.name), {}, one_thread=True)
    if records is None:
        return float("inf")
    return [record["loss"] for record in records if record["kind"] == "eval"][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=list(range(2, 9)))
    parser.add_argument("--factors", type=float, nargs="+", default=[0.5, 1, 2])
    parser.add_argument("--tokens-per-param", type=float, default=0.03)
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--output", type=Path, help="picture to write")
    args = parser.parse_args()
    depths = [
        RecipeInputs(depth, 1, "CPU", args.tokens_per_param, seq_len=256, vocab_size=8192)
        for depth in args.depths
    ]

    def run(one: tuple[RecipeInputs, float]) -> float:
        inputs, factor = one
        loss = final_loss(inputs, factor)
        print(
            f"depth {inputs.depth}: {inputs.num_params:,} parameters, "
            f"{inputs.steps} steps of {inputs.batch}, rate {factor:g} x {inputs.learning_rate:g}: {loss:.4f}",
            flush=True,
        )
        return loss

    runs = [(inputs, factor) for inputs in depths for factor in args.factors]
    with ThreadPoolExecutor(args.at_once) as pool:
        losses = pool.map(run, runs)
        found = {(inputs.depth, factor): loss for (inputs, factor), loss in zip(runs, losses, strict=True)}
    for inputs in depths:
        losses = {factor: found[inputs.depth, factor] for factor in args.factors}
        best = min(losses, key=losses.get)
        print(f"depth {inputs.depth}: best rate {best:g} times the recipe's, loss {losses[best]:.4f}")
    if args.output is not None:
        draw(args.output, depths, args.factors, found)


def draw(
    output: Path, depths: list[RecipeInputs], factors: list[float], found: dict[tuple[int, float], float]
) -> None:
    """Loss against the rate's factor, one line for each depth; and loss against compute."""
    figure, (rates, curve) = pyplot().subplots(1, 2, figsize=(9, 3.6))
    for inputs in depths:
        losses = [found[inputs.depth, factor] for factor in factors]
        rates.plot(factors, losses, marker="o")
        rates.annotate(
            f"depth {inputs.depth}", (1, losses[factors.index(1)]), xytext=(3, 5), textcoords="offset points"
        )
    rates.set(xscale="log", xlabel="learning rate / the recipe's", ylabel="evaluation loss")
    rates.set_xticks(factors, [f"{factor:g}" for factor in factors], minor=False)
    rates.minorticks_off()
    compute = np.array([inputs.compute for inputs in depths])
    losses = [found[inputs.depth, 1] for inputs in depths]
    slope, offset = np.polyfit(np.log(compute), np.log(losses), 1)
    curve.plot(compute, losses, marker="o", linestyle="")
    curve.plot(compute, np.exp(offset) * compute**slope, color="gray", label=f"compute^{slope:.3f}")
    for inputs, loss in zip(depths, losses, strict=True):
        curve.annotate(f" {inputs.depth}", (inputs.compute, loss))
    curve.set(xscale="log", xlabel="compute, FLOPs", ylabel="loss at the recipe's rate")
    curve.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    main()
