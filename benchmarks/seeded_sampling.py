#!/usr/bin/env python3
"""How many seeded rows change when they are sampled in other batches, or by the exported program.

    python benchmarks/seeded_sampling.py [--rows 256] [--layers 12] [--hidden 768] [--heads 12]

A GPT with 50304 tokens and random weights continues prompts of 5 to 40 tokens by 32 sampled ones: each alone,
8 and 32 at a time, and exported, alone and 8 at a time. Rows whose tokens differ from those alone are
counted. Products of other sizes round logits in another way, so that a few can differ; docs/generation.md
says how many are to be expected.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from harness import exported_program, random_model

VOCAB, POSITIONS, NEW, SEED = 50304, 256, 32, 7
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
}
Sample = Callable[[list[list[int]], int, dict[str, Any]], list[list[int]]]
"""(prompts, number of the first one, options) to the new tokens of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--init", type=float, default=0.02, help="standard deviation of the weights")
    args = parser.parse_args()
    next_token = random_model(
        seed=5,
        vocab_size=VOCAB,
        hidden_size=args.hidden,
        num_layers=args.layers,
        num_attention_heads=args.heads,
        max_position_embeddings=POSITIONS,
        initializer_range=args.init,
    )
    import numpy as np

    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, rng.integers(5, 41)).tolist() for _ in range(args.rows)]
    dynamic = sample_with(next_token)  # before the export, which replaces linears
    alone = {name: in_batches(dynamic, prompts, 1, options) for name, options in SETTINGS.items()}
    found = {
        (name, f"batch {size}"): in_batches(dynamic, prompts, size, options)
        for name, options in SETTINGS.items()
        for size in (8, 32)
    }
    program = sample_exported(next_token)
    for name, options in SETTINGS.items():
        for size in (1, 8):
            found[name, f"exported {size}"] = in_batches(program, prompts, size, options)
    for (name, way), rows in found.items():
        differ = sum(row != other for row, other in zip(rows, alone[name], strict=True))
        print(f"{name:<14} {way:<12} {differ} of {args.rows} rows differ from those sampled alone")


def in_batches(sample: Sample, prompts: list[list[int]], size: int, options: dict[str, Any]) -> list:
    starts = range(0, len(prompts), size)
    return [row for start in starts for row in sample(prompts[start : start + size], start, options)]


def sample_with(next_token: Any) -> Sample:
    import paddle

    from ppfleetx.generation.decode_loop import Rules, decode
    from ppfleetx.generation.decoding_session import DecodingSession
    from ppfleetx.generation.gumbel_sampling import RandomStream
    from ppfleetx.generation.sampling_params import SamplingParams

    def sample(prompts: list[list[int]], first: int, options: dict[str, Any]) -> list[list[int]]:
        streams = [RandomStream(SEED, first + row, 0, VOCAB) for row in range(len(prompts))]
        rules = Rules(options=SamplingParams(**options))
        with paddle.no_grad():
            session = DecodingSession(next_token, prompts, use_cache=True)
            rows = decode(session, rules, [NEW] * len(prompts), streams=streams)
        return [row.ids for row in rows]

    return sample


def sample_exported(next_token: Any) -> Sample:
    from ppfleetx.generation.decoding_session import pad_left

    run = exported_program(next_token, POSITIONS, VOCAB)

    def sample(prompts: list[list[int]], first: int, options: dict[str, Any]) -> list[list[int]]:
        streams = range(first, first + len(prompts))
        return run(*pad_left(prompts), NEW, streams, seed=SEED, **{"top_k": 0, **options})

    return sample


if __name__ == "__main__":
    main()
