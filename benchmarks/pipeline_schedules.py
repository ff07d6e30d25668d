#!/usr/bin/env python3
"""Time in which pipeline stages wait: 1F1B and ZB-H1, without and with overlapped messages, on CPUs.

    python benchmarks/pipeline_schedules.py [--stages 4] [--micro-batches 8] [--sleep 0.15] [--steps 3]

Each stage has one small block, which sleeps in its forward pass (F), in the gradient of its input (B) and in
that of its weights (W), ``--sleep`` seconds each. Stages that sleep need no core, so that four of them do not
compete for two. Prints the median step, the share of it in which a stage does none of the three, and what
the schedules promise: (p - 1)(F + B + W) and (p - 1)(F + B - W) beside m (F + B + W) of work. What a stage
computes beside its sleep counts as waiting here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SCHEDULES = (("1f1b", False), ("zb_h1", False), ("zb_h1", True))
"""Each with or without ``Distributed.overlap_p2p_comm``."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--sleep", type=float, default=0.15, metavar="SECONDS")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one untimed")
    args = parser.parse_args()
    if args.micro_batches not in (1, 2, 4, 8, 16):
        parser.error("--micro-batches must divide the 16 sequences of a step")

    from tests.helpers.ranks import Pools

    pools, p, m = Pools(), args.stages, args.micro_batches
    print("schedule  overlap_p2p_comm  step, s  waits  promised", flush=True)
    for schedule, overlaps in SCHEDULES:
        ranks = pools(p).run(
            "benchmarks.pipeline_schedules:measure",
            timeout=60.0 + 10 * (args.steps + 1) * (m + p) * args.sleep,
            schedule=schedule,
            overlaps=overlaps,
            stages=p,
            micro_batches=m,
            seconds=args.sleep,
            steps=args.steps,
        )
        step = statistics.median(max(times) for times in zip(*ranks, strict=True))
        idle = (p - 1) * (3 if schedule == "1f1b" else 1)
        waits, promised = 1 - 3 * m * args.sleep / step, idle / (3 * m + idle)
        print(f"{schedule:8}  {overlaps!s:16}  {step:7.3f}  {waits:5.1%}  {promised:8.1%}", flush=True)
    pools.close()


def measure(
    schedule: str, overlaps: bool, stages: int, micro_batches: int, seconds: float, steps: int
) -> list[float]:
    """Seconds of each step (called in every rank)."""
    from tests.parity.training import GLOBAL_BATCH, build, take_step

    plan = {"pp": stages, "pp_schedule": schedule}
    extra = {"Model.num_layers": stages, "Distributed.overlap_p2p_comm": overlaps}
    cfg, ctx, runner = build(plan, stages, "gpt", "sgd", GLOBAL_BATCH // micro_batches, extra)
    _let_sleep(runner, seconds, in_two_parts=schedule == "zb_h1")
    times = []
    for step in range(steps + 1):
        started = time.monotonic()
        take_step(runner, step, cfg, ctx)
        times.append(time.monotonic() - started)
    return times[1:]


def _let_sleep(runner: Any, seconds: float, *, in_two_parts: bool) -> None:
    """The stage's block takes ``seconds`` longer for each of F, B and W."""
    from benchmarks.pauses import let_sleep
    from ppfleetx.models.gpt.layers import Block

    [block] = [layer for layer in runner.model.sublayers() if isinstance(layer, Block)]
    let_sleep(block, forward=seconds, backward=seconds if in_two_parts else 2 * seconds)
    if in_two_parts:
        matmul = runner._pipeline._matmul
        run_next = matmul.run_next
        matmul.run_next = lambda: (time.sleep(seconds), run_next())


if __name__ == "__main__":
    main()
