#!/usr/bin/env python3
"""How much faster a model is without a quarter of its heads and feed-forward units, on one CPU thread.

    python benchmarks/pruned.py [--pairs 5] [--ratio 0.25]

Sizes are those of the quickstart (6 layers of 256) and of a GPT-2 (12 of 768); weights are random. Measured
in pairs, CPU time of the process: a pass over 512 tokens, which computes, against its operations; and 64
greedy tokens after 64 without guesses, which read the weights, against its parameters.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

from benchmarks import decode

if TYPE_CHECKING:
    from ppfleetx.config.sections.root import ModelConfig
    from ppfleetx.generation.session import NextTokenModel

SIZES = {
    "6 x 256": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "num_layers": 6,
        "num_attention_heads": 8,
        "max_position_embeddings": 512,
    },
    "12 x 768": {
        "vocab_size": decode.VOCAB,
        "hidden_size": decode.HIDDEN,
        "num_layers": decode.LAYERS,
        "num_attention_heads": decode.HEADS,
        "max_position_embeddings": 1024,
    },
}
PASS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ratio", type=float, default=0.25)
    args = parser.parse_args()
    from ppfleetx.utils.process_env import import_paddle, prepare_process

    prepare_process()
    import_paddle()
    for name, sizes in SIZES.items():
        report(name, sizes, args.ratio, args.pairs)


def report(name: str, sizes: dict[str, int], ratio: float, pairs: int) -> None:
    """Print the shares of time beside those of operations and parameters."""
    import numpy as np
    import paddle

    from ppfleetx.compress.prune import pruned_model, sizes_after
    from ppfleetx.config.sections.root import ModelConfig
    from ppfleetx.models.gpt.spec import flops_per_step, parameter_count

    whole = ModelConfig(**sizes)
    models = [whole, pruned_model(whole, sizes_after(whole, ratio))]
    networks = [_network(model) for model in models]
    tokens = paddle.to_tensor(np.random.default_rng(0).integers(0, whole.vocab_size, (1, PASS)))
    prompts = np.random.default_rng(0).integers(0, whole.vocab_size, (1, decode.PROMPT)).tolist()
    loops = [decode.ours(1, model=lambda network=network: network) for network in networks]

    @paddle.no_grad()
    def forward(which: int) -> None:
        networks[which].model(tokens, paddle.arange(PASS).unsqueeze(0))

    flops, parameters = (
        [count(model) for model in models]
        for count in (lambda model: flops_per_step(model, 1, PASS) // 3, parameter_count)
    )
    for what, run, shares in (
        (f"a pass over {PASS} tokens", forward, flops),
        (f"{decode.NEW} tokens one by one", lambda which: loops[which](prompts), parameters),
    ):
        times = _in_pairs(run, pairs)
        found = statistics.median(b / a for a, b in zip(*times, strict=True))
        expected = shares[1] / shares[0]
        print(
            f"{name}, {what}: {min(times[0]):.4f} -> {min(times[1]):.4f} s of CPU time, share {found:.3f} "
            f"(median of {pairs}); of {'operations' if run is forward else 'parameters'} {expected:.3f}; "
            f"speed is {expected / found - 1:+.1%} from proportion",
            flush=True,
        )


def _network(model: ModelConfig) -> NextTokenModel:
    from ppfleetx.generation.session import NextTokenModel
    from ppfleetx.models.gpt.stages import gpt_stages
    from ppfleetx.models.staged import StagedModel
    from ppfleetx.nn.factory import InferenceFactory

    network = StagedModel(gpt_stages(model, InferenceFactory()), seed=0)
    network.eval()
    return NextTokenModel(network, model.vocab_size)


def _in_pairs(run: Callable[[int], object], pairs: int) -> tuple[list[float], list[float]]:
    for which in (0, 1):
        run(which)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(pairs):
        for which in (0, 1):
            start = time.process_time()
            run(which)
            times[which].append(time.process_time() - start)
    return times


if __name__ == "__main__":
    main()
