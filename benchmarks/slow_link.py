#!/usr/bin/env python3
"""Two data-parallel ranks over a slow link: is the sum of the gradients hidden behind the backward pass?

    sudo python benchmarks/slow_link.py [--rates 1000 200] [--steps 5] [--hidden 512] [--layers 6]

Two network namespaces are joined by a cable that lets so many Mbit/s through in each direction (a token
bucket, ``tc qdisc ... tbf``). Each rank has a core of its own. For each rate the same steps are trained
twice, with ``Distributed.sharding.reduce_overlap`` and ``broadcast_overlap`` False and True. Of the first the
time of sums and values is measured beside that of the step: what is left is the computation. Prints, in
seconds and as medians over the steps: computation, communication, the step without and with overlap, wire,
1.1 x max(both) + 5 %, and the least time that any order of sending can reach. That is the longer one of two:
computation, what communication costs the same core, and the way of the tied embedding's gradient, which is
complete when the pass ends; and the time to the first complete gradient, before which there is nothing to
send, then communication, then norm and update, which need all of it.

With ``--sharding`` messages that are waited for one by one use one direction of the cable at a time, and both
with overlap. So the limit there is that of the longer of computation and "wire": what each direction carries
in a step, divided by the rate: half of it values, half of it gradients. The least time is that of two parts.
Up to the first complete gradient: values of the embedding and the first block come before anything is
computed, and all values before the last block. Behind it: the rest is computed, and the tied embedding's
gradient sent; or the gradients take longer. Norm and update come last, before the values of the next step.

``--sleep 0.2`` lets each block sleep so many seconds in the forward pass and twice as many in the backward
pass: the link is then measured against a computation that needs no core, on a machine that has other work.

``--between 0.02`` waits so many seconds between two steps, as training does, which reads data and writes its
log. They are not counted.

Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=[1000, 200], help="Mbit/s")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after two untimed")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=4, help="sequences in a step of one rank")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--vocab", type=int, default=8192, help="its share of the parameters is sent last")
    parser.add_argument("--bucket", type=float, default=8.0, help="Distributed.bucket_size, MiB")
    parser.add_argument("--sharding", type=int, choices=(1, 2), help="stage, instead of dp")
    parser.add_argument("--sleep", type=float, default=0.0, metavar="SECONDS", help="of each block")
    parser.add_argument(
        "--between", type=float, default=0.0, metavar="SECONDS", help="two steps, not counted"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps({str(overlaps): _work(args, overlaps) for overlaps in (False, True)}), flush=True)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the nodes go in any case
    print("Mbit/s  compute  communicate  one after the other  overlapped  wire  1.1 max + 5 %  least")
    for rate in args.rates:
        plain, overlapped = _ranks(rate)
        compute, sums = plain["step"] - plain["sums"], plain["sums"]
        wire = 8e-6 * plain["bytes"] / rate
        limit = 1.1 * max(compute, wire if args.sharding else sums) * 1.05
        least = (_least_of_sharding if args.sharding else _least_of_dp)(plain, overlapped, compute, wire)
        row = (compute, sums, plain["step"], overlapped["step"], wire, limit, least)
        print(f"{rate:6d}" + "".join(f"  {value:8.2f}" for value in row), flush=True)


Times = dict[str, float]


def _least_of_dp(plain: Times, _: Times, compute: float, wire: float) -> float:
    sums = plain["sums"]
    alone = compute + plain["core"] + plain["embedding"] * sums
    return max(alone, plain["first"] + sums + plain["update"])


def _least_of_sharding(plain: Times, overlapped: Times, compute: float, wire: float) -> float:
    each, first = wire / 2, plain["first"]
    update = overlapped["update"]  # without overlap it waits for values
    forward = max(plain["front"] * wire + first, each + plain["late"])
    return forward + max(compute - first - update + plain["embedding"] * wire, each) + update


def _ranks(rate: int) -> list[dict[str, float]]:
    """Run both ranks; the slower one's times without overlap and with it."""
    from tests.multinode.nodes import two_nodes

    with two_nodes() as nodes:
        for node in nodes:
            shape = f"tc qdisc add dev {node.cable} root tbf rate {rate}mbit burst 256kb latency 200ms"
            subprocess.run(node.command(*shape.split()), check=True)
        addresses = [f"{node.address}:{_free_port()}" for node in nodes]
        ranks = []
        for rank, node in enumerate(nodes):
            environ = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": "2",
                "PADDLE_TRAINER_ENDPOINTS": ",".join(addresses),
                "PADDLE_CURRENT_ENDPOINT": addresses[rank],
                "PADDLE_CPU_COMM_DIRECT": "0",
            }
            own = [sys.executable, __file__, *sys.argv[1:], "--worker"]
            command = node.command("taskset", "-c", str(rank), *own)
            ranks.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environ,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        try:
            results = []
            for process in ranks:
                out, errors = process.communicate(timeout=1800)
                if process.returncode:
                    raise SystemExit(f"a rank failed:\n{out[-2000:]}\n{errors[-3000:]}")
                results.append(json.loads(out.splitlines()[-1]))
        finally:
            for process in ranks:
                process.kill()
    both = ([result[str(overlaps)] for result in results] for overlaps in (False, True))
    return [{key: max(one[key] for one in times) for key in times[0]} for times in both]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _work(args: argparse.Namespace, overlaps: bool) -> dict[str, float]:
    """One rank: median seconds of a step, and of that spent in sums after the backward pass."""
    import numpy as np

    from ppfleetx.config.loader import load_config

    values = {
        "Global.global_batch_size": 2 * args.rows,
        "Global.local_batch_size": "null",
        "Global.micro_batch_size": args.rows,
        "Model.vocab_size": args.vocab,
        "Model.hidden_size": args.hidden,
        "Model.num_layers": args.layers,
        "Model.num_attention_heads": args.hidden // 64,
        "Model.max_position_embeddings": args.length,
        "Model.hidden_dropout_prob": 0.0,
        "Model.attention_probs_dropout_prob": 0.0,
        "Data.Train.dataset.max_seq_len": args.length,
        "Data.Eval.dataset.max_seq_len": args.length,
        "Distributed.dp_degree": 1 if args.sharding else 2,
        "Distributed.sharding.sharding_degree": 2 if args.sharding else 1,
        "Distributed.sharding.sharding_stage": args.sharding or 1,
        "Distributed.sharding.broadcast_overlap": overlaps,
        "Distributed.bucket_size": args.bucket,
        "Distributed.sharding.reduce_overlap": overlaps,
    }
    overrides = [f"{key}={value}" for key, value in values.items()]
    cfg = load_config(ROOT / "ppfleetx/configs/debug/gpt_nano.yaml", overrides, world_size=2)
    from ppfleetx.utils.process_env import import_paddle, prepare_process

    prepare_process()
    import_paddle()
    from ppfleetx.core.module.build import build_module
    from ppfleetx.distributed.init import init_distributed
    from ppfleetx.parallel.parallelize import parallelize

    ctx = init_distributed(cfg)
    runner = parallelize(build_module(cfg), cfg, ctx, train=True)
    if args.sleep:
        from benchmarks.pauses import let_sleep

        for block in list(runner.model.stages)[1:-2]:
            let_sleep(block, forward=args.sleep, backward=2 * args.sleep)
    tokens = np.random.default_rng(ctx.rank).integers(0, args.vocab, (args.rows, args.length + 1))
    batch = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": np.ones((args.rows, args.length), np.float32),
        "position_ids": np.tile(np.arange(args.length), (args.rows, 1)),
    }
    sync = runner._sync
    exchanged = [(sync, "reduce")]
    if args.sharding:
        exchanged += [(sync._sharding, "_send"), (sync._values, "updated")]
    sums, update = _Timed(exchanged), _Timed([(sync, "clip"), (runner._optimizer, "step")])
    first, last = _first_gradients(sync.parameters), _last_blocks(runner.model)
    seconds = []
    for step in range(args.steps + 2):
        for timed in (sums, update):
            timed.begin_step()
        begin = time.perf_counter()
        first.append(0.0)
        runner.train_step([batch], step=step + 1, lr=1e-4, weight_decay=0.0)
        seconds.append(time.perf_counter() - begin)
        first[-1] -= begin
        last[-1] -= begin
        time.sleep(args.between)
    return {
        "step": statistics.median(seconds[2:]),
        "sums": statistics.median(sums.seconds[2:]),
        "core": statistics.median(sums.core[2:]),
        "first": statistics.median(first[2:]),
        "late": statistics.median(a - b for a, b in zip(first[2:], last[2:], strict=True)),
        "front": _share_of_front(runner.model, sync) if args.sharding else 0.0,
        "update": statistics.median(update.seconds[2:]),
        "embedding": _share_of_embedding(sync.parameters),
        "bytes": float(sum(4 * p.size for p in sync.parameters)),
    }


class _Timed:
    """Seconds of each step spent in some methods, and seconds of the core; a call within another one is not
    counted twice."""

    def __init__(self, methods: Sequence[tuple[Any, str]]) -> None:
        self.seconds: list[float] = []
        self.core: list[float] = []
        self._is_within = False
        for owner, name in methods:
            setattr(owner, name, partial(self._call, getattr(owner, name)))

    def begin_step(self) -> None:
        self.seconds.append(0.0)
        self.core.append(0.0)

    def _call(self, method: Callable[..., Any], *args: Any, **more: Any) -> Any:
        if self._is_within:
            return method(*args, **more)
        self._is_within, begin, busy = True, time.perf_counter(), time.process_time()
        try:
            return method(*args, **more)
        finally:
            self._is_within = False
            self.seconds[-1] += time.perf_counter() - begin
            self.core[-1] += time.process_time() - busy


def _first_gradients(parameters: Any) -> list[float]:
    """When the first gradient was complete, of each step that appends a 0. The tied embedding's is not: its
    first part comes from the head, the last at the end of the pass."""
    times: list[float] = []

    def note(*_: Any) -> None:
        if not times[-1]:
            times[-1] = time.perf_counter()

    for parameter in parameters:
        if parameter.info.kind != "word_embedding":
            parameter._register_backward_hook(note)
    return times


def _last_blocks(model: Any) -> list[float]:
    """When the last block began its forward pass, of each step."""
    times: list[float] = []
    list(model.stages)[-3].register_forward_pre_hook(lambda *_: times.append(time.perf_counter()))
    return times


def _share_of_front(model: Any, sync: Any) -> float:
    """Of all parameters, what one owner sends of the embedding and the first block: the one with more."""
    sizes: dict[int, int] = {}
    for parameter in [p for stage in list(model.stages)[:2] for p in stage.parameters()]:
        owner = sync._sharding.owner_of(parameter)
        sizes[owner] = sizes.get(owner, 0) + parameter.size
    return max(sizes.values()) / sum(p.size for p in sync.parameters)


def _share_of_embedding(parameters: Any) -> float:
    of_words = sum(p.size for p in parameters if p.info.kind == "word_embedding")
    return of_words / sum(p.size for p in parameters)


if __name__ == "__main__":
    main()
