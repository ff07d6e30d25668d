"""Every legal plan against one card: ``make parity``, or ``python -m tests.parity.every_plan 2 4 -m llama``.

The models ``mixed``, ``latent``, ``gemma``, ``alibi``, ``olmo`` and ``stablelm`` are run on up to 4
processes, ``offset`` on up to 2.

Prints one line a plan with the largest relative difference of loss, gradient norm (AdamW, with clipping,
weight decay, warm-up, accumulation, unequal padding) and final weights (SGD) from the run of one process.
Then plans with quantization-aware training (``-m qat``: those alone), with pruning (``-m pruned``), and runs
that resume under another plan of experts (``-m resume``).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ppfleetx.config.parallel_plan import ParallelPlan, Workload, enumerate_plans
from tests.helpers.ranks import Pools, RanksFailedError
from tests.parity import experts, pruned, qat
from tests.parity.comparison import BFLOAT16_TOLERANCE, IN_BFLOAT16, TOLERANCE, Comparison, Difference
from tests.parity.training import MODELS, SEQ_LEN, SIZES

_MOST_OF = {"mixed": 4, "latent": 4, "gemma": 4, "alibi": 4, "olmo": 4, "stablelm": 4, "offset": 2}
# The order of passes changes nothing that ranks exchange: a choice of plans is enough.
ZERO_BUBBLE = [
    replace(plan, pp_schedule="zb_h1")
    for plan in (
        ParallelPlan(pp=2),
        ParallelPlan(pp=4),
        ParallelPlan(pp=2, mp=2),
        ParallelPlan(pp=2, mp=2, sequence_parallel=True),
        ParallelPlan(pp=2, sharding=2),
        ParallelPlan(pp=2, sharding=2, sharding_stage=2),
        ParallelPlan(pp=2, sharding=2, sharding_stage=3),
        ParallelPlan(pp=2, dp=2),
        ParallelPlan(pp=2, sep=2),
    )
]


def plans_of(model: str, size: int) -> list[ParallelPlan]:
    """Every plan that a model is run under. The two mixtures of experts take turns."""
    if model.startswith("moe"):
        return experts.plans(size, workload(model))[model == "moe_bias" :: 2]
    zero_bubble = [plan for plan in ZERO_BUBBLE if plan.world_size == size]
    return [*enumerate_plans(size, workload(model)), *zero_bubble]


def workload(model: str) -> Workload:
    """The sizes that a plan divides."""
    heads = SIZES["num_attention_heads"]
    return Workload(
        num_layers=SIZES["num_layers"],
        num_heads=heads,
        num_groups=MODELS[model].get("num_query_groups", heads),
        ffn_size=SIZES["ffn_hidden_size"],
        padded_vocab=128,
        seq_len=SEQ_LEN,
        num_experts=4 if model.startswith("moe") else 0,
        expert_size=32,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("-m", "--models", nargs="+", default=[*MODELS, "qat", "pruned", "resume"])
    parser.add_argument(
        "-d", "--dtype", choices=["float32", "bfloat16"], default="float32", help="of products with weights"
    )
    parser.add_argument("-k", "--keyword", default="", help="only plans whose text contains this")
    arguments = parser.parse_args()
    low = arguments.dtype == "bfloat16"
    if low:  # the rows of quantization, pruning and resumption are in float32
        arguments.models = [model for model in arguments.models if model in MODELS]
    passed: list[bool] = []
    with tempfile.TemporaryDirectory() as directory, Pools() as pools:
        comparison = Comparison(pools, Path(directory))
        for what, size, run in runs(comparison, arguments, Path(directory), low):
            if size in arguments.sizes and arguments.keyword in what:
                passed.append(report(what, run))
    tolerance = BFLOAT16_TOLERANCE if low else TOLERANCE
    print(f"{sum(passed)} of {len(passed)} plans equal one card within {tolerance:g}")
    return 0 if all(passed) else 1


Run = Callable[[], tuple[str, bool]]
"""What is said of a comparison, and whether it passed."""


def runs(
    comparison: Comparison, arguments: argparse.Namespace, directory: Path, low: bool
) -> Iterator[tuple[str, int, Run]]:
    """(its line, number of ranks, the comparison) of each."""
    more = {"extra": IN_BFLOAT16, "tolerance": BFLOAT16_TOLERANCE} if low else {}
    for size in arguments.sizes:
        for model in (model for model in arguments.models if model in MODELS):
            for plan in plans_of(model, size) if size <= _MOST_OF.get(model, size) else ():
                yield f"{model:5} {plan}", size, partial(with_both, comparison, plan, model, **more)
    for plan, form, model in qat.rows() if "qat" in arguments.models else ():
        run = partial(with_sgd, comparison, plan, model, **qat.options(form))
        yield f"{model:5} {plan}, QAT ({form})", plan.world_size, run
    for plan, form, model in pruned.rows() if "pruned" in arguments.models else ():
        run = partial(with_both, comparison, plan, model, **pruned.options(form))
        yield f"{model:5} {plan}, pruned {form}", plan.world_size, run
    for number, pair in enumerate(experts.RESUMED) if "resume" in arguments.models else ():
        run = partial(resumed, comparison, pair, directory / f"resumed_{number}")
        yield f"resume {' -> '.join(map(str, pair))}", max(plan.world_size for plan in pair), run


def report(what: str, run: Run) -> bool:
    """Print the line of what ``run`` compares, say whether it passed."""
    started = time.monotonic()
    try:
        said, passed = run()
    except (RanksFailedError, AssertionError) as error:
        print(f"FAILED  {what}\n{error}", flush=True)
        return False
    took = time.monotonic() - started
    print(f"{'passed' if passed else 'FAILED'}  {what}: {said} ({took:.1f} s)", flush=True)
    return passed


def with_both(
    comparison: Comparison, plan: ParallelPlan, model: str, *, tolerance: float = TOLERANCE, **more: Any
) -> tuple[str, bool]:
    """One plan with both optimizers."""
    adamw, sgd = (comparison.run(plan, model, optimizer, **more) for optimizer in ("adamw", "sgd"))
    worst = max(_worst(found, model, tolerance) for found in (adamw, sgd))
    passed = max(adamw.first, sgd.first) == 0 and worst <= tolerance
    return f"{worst:.1e}" if passed else f"adamw: {adamw}; sgd: {sgd}", passed


def _worst(found: Difference, model: str, tolerance: float) -> float:
    """With experts in bfloat16, that of loss and gradient norm: a rounded score may choose another expert,
    and loads, biases and experts' weights then differ by whole tokens."""
    if tolerance > TOLERANCE and "moe" in MODELS[model]:
        return max(found.loss, found.grad_norm)
    return found.worst


def with_sgd(comparison: Comparison, plan: ParallelPlan, model: str, **more: Any) -> tuple[str, bool]:
    found = comparison.run(plan, model, "sgd", **more)
    return str(found), found.first == 0 and found.worst <= TOLERANCE


def resumed(
    comparison: Comparison, pair: tuple[ParallelPlan, ParallelPlan], directory: Path
) -> tuple[str, bool]:
    """Two steps under each plan, the second from the first's checkpoint."""
    worst = experts.resumed(comparison, pair, directory)
    return f"{worst:.1e}", worst <= TOLERANCE


if __name__ == "__main__":
    sys.exit(main())
