#!/usr/bin/env python3
"""Training speed of a mixture of experts on a CPU, in pairs against transformers and against a dense model.

    python benchmarks/moe.py --hf-python PYTHON [--pairs 5] [--peers dense hf_eager hf_grouped_mm]

PYTHON has torch and transformers. A Mixtral of 4 layers of 768 with 8 experts of 1536, 2 of them for a token,
gets random weights by transformers; ours reads the same ones, and both print the loss of the first step. A
step is forward, backward, clipping to norm 1 and AdamW in float32, on 8 sequences of 256 tokens.

hf_eager, hf_batched_mm and hf_grouped_mm are transformers' ways to compute experts. dense: this project, with
an MLP of 3072 in place of the experts, which are as many parameters for a token; it has the same attention.

In each pair both programs run at the same time, one thread each, and what is compared is the CPU time of the
process: of the whole step, and of the passes without the update, whose time grows with all parameters of a
mixture and not with those that a token uses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import Worker, listed, micro_batch_of, ratios, start_paddle

BATCH, SEQ, VOCAB, WIDTH, TOP_K = 8, 256, 16384, 1536, 2
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 768,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": SEQ,
    "num_local_experts": 8,
    "num_experts_per_tok": TOP_K,
    "sliding_window": None,
    "attention_dropout": 0.0,
}
PEERS = ("dense", "hf_eager", "hf_batched_mm", "hf_grouped_mm")

Step = Callable[[int], tuple[float, float]]
"""Trains the step of a number; its loss, and the CPU time at which the update begins."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hf-python", default=sys.executable)
    parser.add_argument("--pairs", type=int, default=5, help="timed steps of each pair, after two untimed")
    parser.add_argument("--peers", nargs="+", default=["dense", "hf_eager", "hf_grouped_mm"], choices=PEERS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker == "make":
        make_weights(args.weights)
    elif args.worker:
        serve(ours(args.worker, args.weights) if args.worker in ("ours", "dense") else theirs(args))
    else:
        with tempfile.TemporaryDirectory() as directory:
            command = [args.hf_python, __file__, "--worker", "make", "--weights", directory]
            subprocess.run(command, check=True)
            for peer in args.peers:
                compare(peer, Path(directory), args)


def compare(peer: str, weights: Path, args: argparse.Namespace) -> None:
    """Print CPU seconds of both, and how many times ours the peer's are, pair by pair."""
    pythons = {"ours": sys.executable, peer: args.hf_python if peer.startswith("hf") else sys.executable}
    options = ("--weights", str(weights))
    workers = [Worker(__file__, mode, 1, *options, python=python) for mode, python in pythons.items()]
    rounds = []
    for number in range(args.pairs + 2):
        for worker in workers:
            worker.start("step")
        rounds.append([worker.result() for worker in workers])
        if number == 0:
            losses = [round(one["loss"], 5) for one in rounds[0]]
            print(f"{peer}: losses of the first step {losses}", flush=True)
    for worker in workers:
        worker.close()
    for what in ("step", "passes"):
        ours, others = ([one[number] for one in rounds[2:]] for number in (0, 1))
        own, their = (statistics.median(one[what] for one in runs) for runs in (ours, others))
        print(
            f"  {what:6} ours {own:6.3f} s, {peer} {their:6.3f} s; "
            f"{peer} / ours {listed(ratios(others, ours, what))}",
            flush=True,
        )


def serve(step: Step) -> None:
    """In a worker: train a step for each line that comes in, and print its loss and CPU seconds."""
    for number, _ in enumerate(sys.stdin, 1):
        start = time.process_time()
        loss, updating = step(number)
        end = time.process_time()
        print(json.dumps({"loss": loss, "step": end - start, "passes": updating - start}), flush=True)


def batch_of(number: int):
    """Random tokens ``[BATCH, SEQ + 1]``, the same for everyone."""
    import numpy as np

    return np.random.default_rng(number).integers(0, VOCAB, (BATCH, SEQ + 1))


def ours(mode: str, weights: Path) -> Step:
    """This project's runner, as the engine calls it: of the mixture, or of the dense model."""
    start_paddle()
    from ppfleetx.checkpoint.state_dict import load_model
    from ppfleetx.checkpoint.weights import ForeignCheckpoint, fitted
    from ppfleetx.config.sections.root import ModelConfig, OptimizerConfig, RunConfig
    from ppfleetx.conversion.huggingface.directory import read_hf
    from ppfleetx.core.module.gpt import GPTModule
    from ppfleetx.distributed.context import ParallelContext
    from ppfleetx.parallel.parallelize import parallelize

    stored = read_hf(weights)
    model = ModelConfig(**stored.model)
    if mode == "dense":
        model = model.model_copy(update={"moe": None, "ffn_hidden_size": TOP_K * WIDTH})
    cfg = RunConfig(Model=model, Optimizer=OptimizerConfig(grad_clip={"clip_norm": 1.0}))
    runner = parallelize(GPTModule(cfg), cfg, ParallelContext.single(), train=True)
    if mode == "ours":
        checkpoint = ForeignCheckpoint(weights, stored.with_tensors(fitted(stored, model)))
        load_model(runner.named_parameters(), checkpoint)
    updating = [0.0]

    def note() -> None:
        updating[0] = time.process_time()

    runner.before_update = note

    def step(number: int) -> tuple[float, float]:
        micro_batch = micro_batch_of(batch_of(number))
        return runner.train_step([micro_batch], step=number, lr=1e-4, weight_decay=0.1).loss, updating[0]

    return step


def make_weights(directory: Path) -> None:
    """With transformers: the model with random weights."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**CONFIG)).save_pretrained(directory)


def theirs(args: argparse.Namespace) -> Step:
    """With transformers: a model that trains with one of its implementations of experts."""
    import torch
    from transformers import MixtralForCausalLM

    torch.set_num_threads(1)
    how = args.worker.removeprefix("hf_")
    model = MixtralForCausalLM.from_pretrained(args.weights, dtype=torch.float32, experts_implementation=how)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step(number: int) -> tuple[float, float]:
        tokens = torch.from_numpy(batch_of(number))
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        updating = time.process_time()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item(), updating

    return step


if __name__ == "__main__":
    main()
