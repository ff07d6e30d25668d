#!/usr/bin/env python3
"""The three products of a linear layer in bfloat16, in pairs against PyTorch's, at the shapes of two models.

    python benchmarks/bfloat16_products.py [--peer-python PYTHON] [--threads 1] [--rounds 3]

PYTHON is an interpreter that has PyTorch. Each round runs both libraries one after the other, in processes of
their own. Operands are in bfloat16 already. PyTorch's result is bfloat16, ours float32, as a run takes it.
Beside them stands Paddle's float32 product. Times are CPU time of the process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable

from harness import cpu_seconds, result_of, start_paddle

SHAPES = {"12x768": (1024, 768, 3072), "6x384": (2048, 384, 1536)}  # rows, in, out
PRODUCTS = ("forward", "input gradient", "weight gradient")
CALLS = 30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", help="interpreter with PyTorch; without it ours are timed alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", choices=["ours", "peer"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(ours() if args.worker == "ours" else peer(args.threads)))
        return
    pythons = {"ours": sys.executable} | ({"peer": args.peer_python} if args.peer_python else {})
    rounds = [
        {key: value for name, python in pythons.items() for key, value in spawn(name, python, args).items()}
        for _ in range(args.rounds)
    ]
    for shape, (rows, width_in, width_out) in SHAPES.items():
        for product in PRODUCTS:
            times = {
                library: statistics.median(one[f"{library} {shape} {product}"] for one in rounds)
                for library in ("bfloat16", "float32", *(["torch"] if args.peer_python else []))
            }
            rate = 2e-9 * rows * width_in * width_out
            text = ", ".join(
                f"{name} {seconds * 1e3:.2f} ms ({rate / seconds:.0f} GFLOP/s)"
                for name, seconds in times.items()
            )
            print(f"{shape:7} {product:16} {text}")


def spawn(worker: str, python: str, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of each product of one library, in a process of its own."""
    words = ("--worker", worker, "--threads", str(args.threads))
    return result_of(__file__, words, args.threads, python)


def ours() -> dict[str, float]:
    start_paddle()
    import paddle

    from ppfleetx.nn.cpu_ops import bfloat16

    if not bfloat16.are_available():
        raise SystemExit("this CPU has no AVX512-BF16, or `python -m ppfleetx.nn.cpu_ops` has not run")
    found = {}
    for shape, (rows, width_in, width_out) in SHAPES.items():
        wide = [paddle.randn(size) for size in ([rows, width_in], [width_in, width_out], [rows, width_out])]
        low = [bfloat16.cast(tensor) for tensor in wide]
        for library, multiply, (x, w, g) in (
            ("bfloat16", bfloat16.matmul, low),
            ("float32", paddle.matmul, wide),
        ):
            calls = (
                lambda x=x, w=w, f=multiply: f(x, w),
                lambda g=g, w=w, f=multiply: f(g, w, transpose_y=True),
                lambda x=x, g=g, f=multiply: f(x, g, transpose_x=True),
            )
            for product, call in zip(PRODUCTS, calls, strict=True):
                found[f"{library} {shape} {product}"] = seconds(call)
    return found


def peer(threads: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(threads)
    found = {}
    for shape, (rows, width_in, width_out) in SHAPES.items():
        sizes = ((rows, width_in), (width_out, width_in), (rows, width_out))
        x, w, g = (torch.randn(size).bfloat16() for size in sizes)
        calls = (
            lambda x=x, w=w: torch.nn.functional.linear(x, w),
            lambda g=g, w=w: g @ w,
            lambda x=x, g=g: g.t() @ x,
        )
        for product, call in zip(PRODUCTS, calls, strict=True):
            found[f"torch {shape} {product}"] = seconds(call)
    return found


def seconds(call: Callable[[], object]) -> float:
    """Median CPU time of a call."""
    return statistics.median([cpu_seconds(call) for _ in range(CALLS)][3:])


if __name__ == "__main__":
    main()
