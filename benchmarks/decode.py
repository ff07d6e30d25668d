#!/usr/bin/env python3
"""Decoding speed on a CPU, in pairs against Hugging Face transformers (PyTorch, float32).

    python benchmarks/decode.py [--threads 1] [--pairs 5] [--batches 1 8] [--modes dynamic exported hf]

A GPT-2 of 12 layers with hidden size 768, 12 heads and 50304 tokens continues prompts of 64 tokens by 64
greedy ones; nothing ends a row early. Both programs do all of ``generate``: the prompt's pass, the cache,
choosing the token, the loop. Compared are tokens per CPU second (time of the process on all its threads,
which other jobs on the machine disturb less than the clock on the wall). Each mode keeps a process of its
own that idles while the others run, and in every round the modes run one after the other on the same cores.
The operators for decoding (ppfleetx/nn/cpu_ops) are compiled first where they can be.

dynamic: this project, greedy, a pass for each token. sampling: the same with top-p 0.9.
lookup: what the generation program does for up to 3 greedy prompts: tokens are guessed from earlier text and
checked several in a pass. The gain depends on how much the text repeats itself, and random weights repeat
themselves more than trained ones; hf_lookup is transformers with its own option for it, for one row only.
exported, exported_lookup, exported_sampling: the same with the program that tools/export.py makes, run by
Paddle Inference. It guesses for a single row only; tools/inference.py lets it unless told otherwise.
hf: ``transformers.generate`` as it is set up by default.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness import Clock, Worker, compile_operators, exported_program, in_rounds, random_model, report

if TYPE_CHECKING:
    from ppfleetx.generation.decoding_session import NextTokenModel

LAYERS, HIDDEN, HEADS, VOCAB, POSITIONS = 12, 768, 12, 50304, 1024
PROMPT, NEW = 64, 64
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
}
GUESSES = 16  # the default of Generation.prompt_lookup_num_tokens

Generate = Callable[[list[list[int]]], list[list[int]]]
"""Prompts to the new tokens of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=5, help="rounds in which every mode runs once")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--worker", choices=list(MODES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(MODES[args.worker](args.threads))
        return
    compile_operators()
    count = ("--threads", str(args.threads))
    workers = {mode: Worker(__file__, mode, args.threads, *count) for mode in args.modes}
    try:
        for batch in args.batches:
            fitting = {m: worker for m, worker in workers.items() if batch == 1 or m not in ONE_ROW}
            report(f"batch {batch}", in_rounds(fitting, batch, args.pairs), COMPARED)
    finally:
        for worker in workers.values():
            worker.close()


def serve(generate: Generate) -> None:
    """In a worker: for each batch size read, generate and print what it took."""
    import numpy as np

    for line in sys.stdin:
        prompts = np.random.default_rng(0).integers(0, VOCAB, (int(line), PROMPT)).tolist()
        clock = Clock()
        rows = generate(prompts)
        tokens = sum(map(len, rows))
        rates = clock.rates(tokens)
        assert tokens == len(prompts) * NEW
        print(json.dumps(rates), flush=True)


def ours(
    threads: int,
    *,
    most_guesses: int = 0,
    model: Callable[[], NextTokenModel] | None = None,
    **sampling: float,
) -> Generate:
    """The decoding loops that the generation program runs, on random weights."""
    next_token = (model or our_model)()
    import paddle

    from ppfleetx.generation.decode_loop import Rules, decode
    from ppfleetx.generation.decoding_session import DecodingSession
    from ppfleetx.generation.gumbel_sampling import RandomStream
    from ppfleetx.generation.sampling_params import SamplingParams
    from ppfleetx.generation.speculative_decoding import decode_with_drafts

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        streams = [RandomStream(0, row, 0, VOCAB) for row in range(len(prompts))] if sampling else ()
        with paddle.no_grad():
            limits = [NEW] * len(prompts)
            if most_guesses:
                rows = decode_with_drafts(next_token, prompts, Rules(), limits, most_guesses)
            else:
                session = DecodingSession(next_token, prompts, use_cache=True)
                rows = decode(session, Rules(options=SamplingParams(**sampling)), limits, streams=streams)
        return [row.ids for row in rows]

    return generate


def exported(
    threads: int, *, model: Callable[[], NextTokenModel] | None = None, **options: float
) -> Generate:
    """The same model as an exported program. Exporting takes a minute before the first round."""
    import numpy as np

    run = exported_program((model or our_model)(), POSITIONS, VOCAB, threads)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        tokens, padding = np.array(prompts), np.zeros(len(prompts), np.int64)
        return run(tokens, padding, NEW, range(len(prompts)), **options)

    return generate


def our_model(**sizes: int) -> NextTokenModel:
    """This project's model of this shape with random weights; ``sizes`` are keys of ``Model`` that differ."""
    return random_model(**{**SHAPE, **sizes})


def hugging_face(threads: int, *, prepare: Callable[[Any], Any] | None = None, **options: int) -> Generate:
    """``generate`` of transformers on a GPT-2 of the same shape with its own random weights.

    Args:
        prepare: what is done to the model first.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=VOCAB, n_positions=POSITIONS, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS)
    shape.bos_token_id = shape.eos_token_id = None
    model = GPT2LMHeadModel(shape).eval()
    if prepare is not None:
        model = prepare(model)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        rules = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, **options}
        out = model.generate(ids, attention_mask=mask, **rules)
        return out[:, PROMPT:].tolist()

    return generate


MODES: dict[str, Callable[[int], Generate]] = {
    "dynamic": ours,
    "lookup": lambda threads: ours(threads, most_guesses=GUESSES),
    "sampling": lambda threads: ours(threads, top_p=0.9),
    "exported": exported,
    "exported_lookup": lambda threads: exported(threads, most_guesses=GUESSES),
    "exported_sampling": lambda threads: exported(threads, top_k=0, top_p=0.9),
    "hf": hugging_face,
    "hf_lookup": lambda threads: hugging_face(threads, prompt_lookup_num_tokens=GUESSES),
}
ONE_ROW = ("hf_lookup", "exported_lookup")
COMPARED = (
    ("dynamic", "hf"),
    ("lookup", "hf"),
    ("lookup", "hf_lookup"),
    ("lookup", "dynamic"),
    ("sampling", "dynamic"),
    ("exported", "hf"),
    ("exported_lookup", "hf"),
    ("exported_lookup", "exported"),
    ("exported", "dynamic"),
    ("exported_sampling", "exported"),
)


if __name__ == "__main__":
    main()
