"""Every legal plan against one card: ``make parity``, or ``python -m tests.parity.every_plan 2 4 -m llama``.

The models ``mixed``, ``latent``, ``gemma``, ``alibi``, ``olmo`` and ``stablelm`` are run on up to 4
processes, ``offset`` on up to 2.

Prints one line a plan with the largest relative difference of loss, gradient norm (AdamW, with clipping,
weight decay, warm-up, accumulation, unequal padding) and final weights (SGD) from the run of one process.
Then plans with quantisation-aware training (``-m qat``: those alone), with pruning (``-m pruned``), and runs
that resume under another plan of experts (``-m resume``).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppfleetx.config.plan import ParallelPlan, Workload, enumerate_plans
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
    more = {"extra": IN_BFLOAT16, "tolerance": BFLOAT16_TOLERANCE} if low else {}
    if low:  # the rows of quantisation, pruning and resumption are in float32
        arguments.models = [model for model in arguments.models if model in MODELS]
    failures = total = 0
    pools = Pools()
    with tempfile.TemporaryDirectory() as directory:
        comparison = Comparison(pools, Path(directory))
        for size in arguments.sizes:
            for model in (model for model in arguments.models if model in MODELS):
                if size > _MOST_OF.get(model, size):
                    continue
                for plan in plans_of(model, size):
                    if arguments.keyword in str(plan):
                        total += 1
                        failures += not report(comparison, plan, model, **more)
        for plan, form, model in qat.rows() if "qat" in arguments.models else ():
            if plan.world_size in arguments.sizes and arguments.keyword in f"{plan}, {form}":
                total += 1
                failures += not report_qat(comparison, plan, form, model)
        pruning = Comparison(pools, Path(directory), train=pruned.TRAIN)
        for plan, form, model in pruned.rows() if "pruned" in arguments.models else ():
            if plan.world_size in arguments.sizes and arguments.keyword in f"{plan}, {form}":
                total += 1
                failures += not report(pruning, plan, model, f"pruned {form}", extra=pruned.FORMS[form])
        for pair in experts.RESUMED if "resume" in arguments.models else ():
            text = " -> ".join(map(str, pair))
            if max(plan.world_size for plan in pair) in arguments.sizes and arguments.keyword in text:
                total += 1
                failures += not report_resumed(comparison, pair, Path(directory) / f"resumed_{total}")
        pools.close()
    tolerance = BFLOAT16_TOLERANCE if low else TOLERANCE
    print(f"{total - failures} of {total} plans equal one card within {tolerance:g}")
    return 1 if failures else 0


def report(
    comparison: Comparison,
    plan: ParallelPlan,
    model: str,
    form: str = "",
    *,
    tolerance: float = TOLERANCE,
    **more: Any,
) -> bool:
    """Run one plan with both optimizers, print its line, say whether it passed."""
    started, what = time.monotonic(), f"{plan}, {form}" if form else str(plan)
    try:
        adamw, sgd = (comparison.run(plan, model, optimizer, **more) for optimizer in ("adamw", "sgd"))
    except (RanksFailedError, AssertionError) as error:
        print(f"FAILED  {model:5} {what}\n{error}", flush=True)
        return False
    worst = max(_worst(found, model, tolerance) for found in (adamw, sgd))
    passed = max(adamw.first, sgd.first) == 0 and worst <= tolerance
    said = f"{worst:.1e}" if passed else f"adamw: {adamw}; sgd: {sgd}"
    took = time.monotonic() - started
    print(f"{'passed' if passed else 'FAILED':7} {model:5} {what}: {said} ({took:.1f} s)", flush=True)
    return passed


def _worst(found: Difference, model: str, tolerance: float) -> float:
    """With experts in bfloat16, that of loss and gradient norm: a rounded score may choose another expert,
    and loads, biases and experts' weights then differ by whole tokens."""
    if tolerance > TOLERANCE and "moe" in MODELS[model]:
        return max(found.loss, found.grad_norm)
    return found.worst


def report_qat(comparison: Comparison, plan: ParallelPlan, form: str, model: str) -> bool:
    """Run one plan with quantisation-aware training, print its line, say whether it passed."""
    started = time.monotonic()
    try:
        found = comparison.run(plan, model, "sgd", **qat.options(form))
    except (RanksFailedError, AssertionError) as error:
        print(f"FAILED  {model:5} {plan}, QAT ({form})\n{error}", flush=True)
        return False
    passed = found.first == 0 and found.worst <= TOLERANCE
    took = time.monotonic() - started
    word = "passed" if passed else "FAILED"
    print(f"{word:7} {model:5} {plan}, QAT ({form}): {found} ({took:.1f} s)", flush=True)
    return passed


def report_resumed(comparison: Comparison, pair: tuple[ParallelPlan, ParallelPlan], directory: Path) -> bool:
    """Two steps under each plan, the second from the first's checkpoint; print the line, say whether it
    passed."""
    try:
        worst = experts.resumed(comparison, pair, directory)
    except (RanksFailedError, AssertionError) as error:
        print(f"FAILED  resume {' -> '.join(map(str, pair))}\n{error}", flush=True)
        return False
    passed = worst <= TOLERANCE
    word = "passed" if passed else "FAILED"
    print(f"{word:7} resume {' -> '.join(map(str, pair))}: {worst:.1e}", flush=True)
    return passed


if __name__ == "__main__":
    sys.exit(main())
