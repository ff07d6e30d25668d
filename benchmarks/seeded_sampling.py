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
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

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
    from ppfleetx.utils.process_env import import_paddle, prepare_process

    prepare_process()
    import_paddle()
    import numpy as np

    next_token = make_model(args)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, rng.integers(5, 41)).tolist() for _ in range(args.rows)]
    with tempfile.TemporaryDirectory() as directory:
        dynamic = sample_with(next_token)  # before the export, which replaces linears
        ways = [(dynamic, 8, "batch 8"), (dynamic, 32, "batch 32")]
        alone = {name: in_batches(dynamic, prompts, 1, options) for name, options in SETTINGS.items()}
        found = {
            (name, way): in_batches(sample, prompts, size, options)
            for name, options in SETTINGS.items()
            for sample, size, way in ways
        }
        program = sample_exported(next_token, Path(directory))
        for name, options in SETTINGS.items():
            for size in (1, 8):
                found[name, f"exported {size}"] = in_batches(program, prompts, size, options)
    for (name, way), rows in found.items():
        differ = sum(row != other for row, other in zip(rows, alone[name], strict=True))
        print(f"{name:<14} {way:<12} {differ} of {args.rows} rows differ from those sampled alone")


def make_model(args: argparse.Namespace) -> Any:
    from ppfleetx.config.sections.root import ModelConfig
    from ppfleetx.generation.decoding_session import NextTokenModel
    from ppfleetx.models.gpt.stages import gpt_stages
    from ppfleetx.models.staged_model import StagedModel
    from ppfleetx.nn.layer_factory import InferenceFactory

    cfg = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=args.hidden,
        num_layers=args.layers,
        num_attention_heads=args.heads,
        max_position_embeddings=POSITIONS,
        initializer_range=args.init,
    )
    model = StagedModel(gpt_stages(cfg, InferenceFactory()), seed=5)
    model.eval()
    return NextTokenModel(model, VOCAB)


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


def sample_exported(next_token: Any, directory: Path) -> Sample:
    import numpy as np

    from ppfleetx.config.sections.root import InferenceConfig
    from ppfleetx.deploy.export_dir import PROGRAM
    from ppfleetx.deploy.inference_engine import Program
    from ppfleetx.deploy.static.program import save_program
    from ppfleetx.generation.decoding_session import pad_left
    from ppfleetx.generation.gumbel_sampling import RandomStream

    save_program(next_token, POSITIONS, directory / PROGRAM)
    program = Program(directory, [path.name for path in directory.iterdir()], InferenceConfig(), "cpu")

    def sample(prompts: list[list[int]], first: int, options: dict[str, Any]) -> list[list[int]]:
        tokens, padding = pad_left(prompts)
        streams = [RandomStream(SEED, first + row, 0, VOCAB) for row in range(len(prompts))]
        return program.run(
            {
                "tokens": tokens,
                "padding": padding,
                "max_new_tokens": np.full(len(prompts), NEW),
                "exponentials": np.stack([stream.numbers(0, NEW) for stream in streams]),
                "end_ids": np.array([-1]),
                "min_new_tokens": np.array([0]),
                "repetition_penalty": np.array([1.0], np.float32),
                "temperature": np.array([1.0], np.float32),
                "top_k": np.array([options.get("top_k", 0)]),
                "top_p": np.array([options.get("top_p", 1.0)], np.float32),
                "most_guesses": np.array([0]),
            }
        ).tolist()

    return sample


if __name__ == "__main__":
    main()
