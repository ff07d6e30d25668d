#!/usr/bin/env python3
"""Training throughput on a CPU, in pairs against nanoGPT (PyTorch) or transformers' Trainer at equal shapes.

    python benchmarks/throughput.py --nanogpt DIR [--peer-python PYTHON] [--threads 1] [--pairs 3]
                                    [--dtype bfloat16] [--peer-dtype bfloat16] [--peer-compile]
    python benchmarks/throughput.py --trainer [...]

DIR is a checkout of nanoGPT; PYTHON an interpreter that has PyTorch, and transformers for ``--trainer``.
Each pair runs both programs one after the other in processes of their own, on the same cores, and compares
tokens per CPU second (time of the process on all its threads, which other jobs on the machine disturb less
than the clock on the wall). Both do what their trainers do in a step: forward, backward, clipping to norm 1,
AdamW.

Without either only this project is measured. ``--profile`` adds a table of where the step's time
goes and compares the whole step with the best float32 matrix product of the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from harness import Clock, Rates, cpu_seconds, micro_batch_of, report, result_of, start_paddle

VOCAB, SEQ = 50304, 256
SHAPES = {"12x768": (12, 768, 12, 4), "6x384": (6, 384, 6, 8)}  # layers, hidden, heads, batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    peers = parser.add_mutually_exclusive_group()
    peers.add_argument("--nanogpt", type=Path, help="checkout of nanoGPT to compare with")
    peers.add_argument("--trainer", action="store_true", help="compare with the Trainer of transformers")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with PyTorch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=3)
    types = ["float32", "bfloat16"]
    parser.add_argument("--dtype", choices=types, default="float32", help="of this project's products")
    parser.add_argument("--peer-dtype", choices=types, default="float32", help="bfloat16: by autocast")
    parser.add_argument("--peer-compile", action="store_true", help="the peer with torch.compile")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each run, after two untimed")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--profile", action="store_true", help="say where the step's time goes")
    parser.add_argument("--worker", choices=["ours", "nanogpt", "trainer", "profile"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker = {
            "ours": run_ours,
            "nanogpt": run_nanogpt,
            "trainer": run_trainer,
            "profile": run_profile,
        }
        print(json.dumps(worker[args.worker](*SHAPES[args.shapes[0]], args)))
        return
    for shape in args.shapes:
        compare(shape, args)
    if args.profile:
        for shape in args.shapes:
            profile(shape, args)


def compare(shape: str, args: argparse.Namespace) -> None:
    """Print tokens per CPU second of both, and the ratio pair by pair."""
    peer = "nanogpt" if args.nanogpt else "trainer" if args.trainer else None
    pythons = {"ours": sys.executable} | ({peer: args.peer_python} if peer else {})
    results: dict[str, list[Rates]] = {name: [] for name in pythons}
    for _ in range(args.pairs):
        for name, python in pythons.items():
            results[name].append(spawn(name, python, shape, args))
    report(shape, results, [("ours", str(peer))])


def spawn(worker: str, python: str, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one worker in a process of its own and return what it measured."""
    words = ["--worker", worker, "--shapes", shape, "--steps", str(args.steps)]
    words += ["--threads", str(args.threads), "--dtype", args.dtype, "--peer-dtype", args.peer_dtype]
    if args.nanogpt:
        words += ["--nanogpt", str(args.nanogpt)]
    if args.peer_compile:
        words += ["--peer-compile"]
    return result_of(__file__, words, args.threads, python)


def run_ours(layers: int, hidden: int, heads: int, batch: int, args: argparse.Namespace) -> dict[str, float]:
    """Train steps of this project's runner, exactly as the engine calls it."""
    return measure(make_step(make_runner(layers, hidden, heads, args.dtype), batch), batch * SEQ, args.steps)


def make_step(runner, batch: int):
    """A function that trains one step on random tokens."""
    import numpy as np

    rng = np.random.default_rng(0)

    def step(number: int) -> None:
        tokens = rng.integers(0, VOCAB, (batch, SEQ + 1))
        micro_batch = micro_batch_of(tokens)
        runner.train_step([micro_batch], step=number, lr=1e-4, weight_decay=0.1)

    return step


def make_runner(layers: int, hidden: int, heads: int, dtype: str = "float32"):
    """A local runner of a GPT-2 of this shape; sets the process up as the tools do."""
    start_paddle()
    from ppfleetx.config.sections.root import EngineConfig, ModelConfig, OptimizerConfig, RunConfig
    from ppfleetx.core.module.gpt import GPTModule
    from ppfleetx.distributed.context import ParallelContext
    from ppfleetx.parallel.parallelize import parallelize

    model_cfg = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=SEQ,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    engine = EngineConfig(mix_precision={"enable": dtype == "bfloat16", "dtype": "bfloat16"})
    optimizer = OptimizerConfig(grad_clip={"clip_norm": 1.0})
    cfg = RunConfig(Model=model_cfg, Engine=engine, Optimizer=optimizer)
    return parallelize(GPTModule(cfg), cfg, ParallelContext.single(), train=True)


def run_nanogpt(
    layers: int, hidden: int, heads: int, batch: int, args: argparse.Namespace
) -> dict[str, float]:
    """Train steps as nanoGPT's train.py does them on a CPU."""
    sys.path.insert(0, str(args.nanogpt))
    import torch
    from model import GPT, GPTConfig

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    sys.stdout = sys.stderr
    model = GPT(
        GPTConfig(
            block_size=SEQ,
            vocab_size=VOCAB,
            n_layer=layers,
            n_head=heads,
            n_embd=hidden,
            dropout=0.0,
            bias=True,
        )
    )
    optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), "cpu")
    sys.stdout = sys.__stdout__
    if args.peer_compile:
        model = torch.compile(model)

    def step(number: int) -> None:
        tokens = torch.randint(0, VOCAB, (batch, SEQ + 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=args.peer_dtype == "bfloat16"):
            _, loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return measure(step, batch * SEQ, args.steps)


def run_trainer(
    layers: int, hidden: int, heads: int, batch: int, args: argparse.Namespace
) -> dict[str, float]:
    """Steps of transformers' Trainer, with a GPT-2 of this shape and random tokens."""
    import tempfile

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    torch.set_num_threads(args.threads)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=SEQ,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    rows = torch.randint(0, VOCAB, (batch * (args.steps + 2), SEQ))
    times = []

    class Times(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.clock = Clock()

        def on_step_end(self, *_, **__):
            times.append(self.clock.read())

    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            per_device_train_batch_size=batch,
            num_train_epochs=1,
            use_cpu=True,
            bf16=args.peer_dtype == "bfloat16",
            torch_compile=args.peer_compile,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[Times()]).train()
    return rates(times, batch * SEQ)


def profile(shape: str, args: argparse.Namespace) -> None:
    """Print operators by their share of the step, and the step's FLOP/s beside the best matrix product's."""
    result = spawn("profile", sys.executable, shape, args)
    print(f"\n{shape}: {result['step_s'] * 1e3:.0f} ms a step, of which operators")
    for name, seconds in result["operators"]:
        print(f"  {name:28} {seconds * 1e3:8.1f} ms {100 * seconds / result['step_s']:6.1f} %")
    print(
        f"  {result['gflops']:.0f} GFLOP/s over the whole step, {result['best_gflops']:.0f} in the best "
        f"matrix product: {100 * result['gflops'] / result['best_gflops']:.0f} %"
    )


def run_profile(layers: int, hidden: int, heads: int, batch: int, args: argparse.Namespace) -> dict:
    """Time by operator from Paddle's profiler, and the machine's best matrix product."""
    import tempfile

    runner = make_runner(layers, hidden, heads, args.dtype)
    from paddle import profiler

    step = make_step(runner, batch)
    seconds = batch * SEQ / measure(step, batch * SEQ, args.steps)["tokens_per_cpu_s"]
    with tempfile.TemporaryDirectory() as directory:
        with profiler.Profiler(targets=[profiler.ProfilerTarget.CPU], on_trace_ready=lambda _: None) as prof:
            step(100)
            prof.step()
        trace = Path(directory) / "trace.json"
        prof.export(str(trace), format="json")
        events = json.loads(trace.read_text(errors="replace"))["traceEvents"]
    flops = 6 * layers * (12 * hidden**2 + SEQ * hidden) + 6 * hidden * VOCAB  # of a token, causal half
    return {
        "step_s": seconds,
        "operators": operator_times(events)[:14],
        "gflops": flops * batch * SEQ / seconds / 1e9,
        "best_gflops": best_matmul_gflops(),
    }


def operator_times(events: list[dict]) -> list[tuple[str, float]]:
    """(operator, seconds) with the longest first; ``*_grad`` are the backward operators."""
    totals: dict[str, float] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "Operator":
            name = event["name"].split(" ")[0].split("[")[0]
            totals[name] = totals.get(name, 0.0) + event["dur"] / 1e6
    return sorted(totals.items(), key=lambda pair: -pair[1])


def best_matmul_gflops(size: int = 1536) -> float:
    """Best of several float32 products of square matrices, per CPU second."""
    import paddle

    a, b = paddle.randn([size, size]), paddle.randn([size, size])
    seconds = min(cpu_seconds(lambda: paddle.matmul(a, b)) for _ in range(8))
    return 2 * size**3 / seconds / 1e9


def measure(step, tokens: int, steps: int) -> dict[str, float]:
    """Two untimed steps, then ``steps`` timed ones; medians over steps."""
    times = []
    for number in range(1, steps + 3):
        clock = Clock()
        step(number)
        times.append(clock.read())
    return rates(times, tokens)


def rates(times: list[tuple[float, float]], tokens: int) -> dict[str, float]:
    """Tokens per second, from (CPU, wall) seconds of each step; the first two steps are left out."""
    cpu, wall = zip(*times[2:], strict=True)
    return {
        "tokens_per_cpu_s": tokens / statistics.median(cpu),
        "tokens_per_s": tokens / statistics.median(wall),
    }


if __name__ == "__main__":
    main()
