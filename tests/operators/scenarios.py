"""The runs whose kernels make the table: few for every test run, all for ``make operators``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ppfleetx.config.plan import ParallelPlan, Workload, enumerate_plans
from tests.parity.comparison import fields_of, micro_batch_size_of
from tests.parity.training import MODELS

CASES = "tests.operators.cases:"
LAYERS = 4
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    **{
        f"{dtype} {level}": {"enable": True, "dtype": dtype, "level": level}
        for dtype in ("float16", "bfloat16")
        for level in ("O1", "O2")
    },
}
DROPOUT = {"Model.hidden_dropout_prob": 0.1, "Model.attention_probs_dropout_prob": 0.1}
# Blocks and losses that the three models of the parity suite lack.
VARIANTS: dict[str, dict[str, Any]] = {
    "dropout": DROPOUT,
    "recompute": {"Model.use_recompute": True},
    "recompute core": {"Model.use_recompute": True, "Model.recompute_granularity": "core_attn"},
    "lora": {"Model.lora.rank": 4},
    "sandwich": {"Model.sandwich_norm": True, "Model.hidden_act": "relu2"},
    "gelu exact": {"Model.hidden_act": "gelu_exact", "Model.add_qkv_bias": False},
    "pieces": {"Model.loss_chunks": 2},
    "reference": {"Model.attention_kernel": "reference", **DROPOUT},
    "full checks": {"Engine.checks": "full"},
}
GENERATIONS = {
    "greedy": ["Generation.decode_strategy=greedy_search", "Generation.repetition_penalty=1.2"],
    "sampling": ["Generation.num_return_sequences=2", "Generation.temperature=1.5", "Generation.top_p=0.9"],
    "top k": ["Generation.top_k=5", "Generation.min_dec_len=2"],
    "beam": ["Generation.decode_strategy=beam_search", "Generation.num_beams=3"],
    "guesses": [
        "Generation.prompt=the hat the cat the hat the",
        "Generation.decode_strategy=greedy_search",
        "Generation.max_dec_len=40",
    ],
}


@dataclass(frozen=True)
class Scenario:
    """One recording.

    Attributes:
        name: for people.
        case: function of tests/operators/cases.py.
        world: ranks that run it.
        arguments: of the function.
    """

    name: str
    case: str
    world: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)


def training(plan: ParallelPlan, model: str, precision: str, *variants: str, **more: Any) -> Scenario:
    """Steps and an evaluation under a plan."""
    size = micro_batch_size_of(plan)
    # A head of 8: what flash attention takes.
    extra = {"Model.num_layers": LAYERS if plan.pp * plan.virtual_pp_degree > 2 else 2, "Model.head_dim": 8}
    for variant in variants:
        extra |= VARIANTS[variant]
    extra |= {f"Engine.mix_precision.{key}": value for key, value in PRECISIONS[precision].items()}
    arguments = {"plan": fields_of(plan), "model": model, "micro_batch_size": size, "extra": extra, **more}
    name = ", ".join([model, str(plan), precision, *variants, *(("documents",) if more else ())])
    arguments["world_size"] = plan.world_size
    return Scenario(name, "kernels_of_training", plan.world_size, arguments)


def generation(style: str, world: int, dtype: str) -> Scenario:
    """Every strategy; ``directory`` is that of a run of the style."""
    plan = [f"Distributed.mp_degree={world}"] if world > 1 else []
    arguments = {"directory": style, "plan": plan, "world": world, "dtype": dtype}
    return Scenario(f"generation, {style}, {world} ranks, {dtype}", "kernels_of_generation", world, arguments)


def finetuning(precision: str) -> Scenario:
    """A classifier."""
    extra = {f"Engine.mix_precision.{key}": value for key, value in PRECISIONS[precision].items()}
    extra["Model.num_layers"] = 2
    return Scenario(f"finetuning, {precision}", "kernels_of_finetuning", 1, {"extra": extra})


def few() -> Iterator[Scenario]:
    """One of each kind, for every run of the tests."""
    one, two = ParallelPlan(), ParallelPlan
    yield training(one, "gpt", "float32", "dropout", documents=True)
    yield training(one, "llama", "bfloat16 O2", "recompute")
    yield training(one, "mixed", "float16 O1", "dropout")
    yield training(two(mp=2, sequence_parallel=True), "gpt", "bfloat16 O2", "dropout")
    yield training(two(pp=2), "llama", "float32")
    yield training(two(sharding=2, sharding_stage=3), "gpt", "float16 O2")
    yield finetuning("float32")
    yield generation("gpt2", 1, "float32")


def everything(sizes: tuple[int, ...]) -> Iterator[Scenario]:
    """Every plan of these sizes, model and precision, the variants, generation and finetuning."""
    for size in sizes:
        for model in MODELS:
            for plan in enumerate_plans(size, _workload(model)):
                # Of larger jobs one precision: a kernel does not know how many ranks there are.
                for precision in PRECISIONS if size <= 2 else ("bfloat16 O2",):
                    yield training(plan, model, precision)
        if size == 1:
            yield from _single()
    if 2 in sizes:
        for variant in ("dropout", "lora", "sandwich", "pieces", "full checks"):
            for plan in (ParallelPlan(mp=2), ParallelPlan(pp=2), ParallelPlan(sep=2)):
                yield training(plan, "llama", "bfloat16 O2", variant)
        yield from (generation(style, 2, "float32") for style in ("gpt2", "llama"))


def _single() -> Iterator[Scenario]:
    for precision in PRECISIONS:
        for variant in VARIANTS:
            yield training(ParallelPlan(), "gpt", precision, variant)
            yield training(ParallelPlan(), "llama", precision, variant, documents=True)
        yield finetuning(precision)
    for style in ("gpt2", "llama"):
        for dtype in ("float32", "float16", "bfloat16"):
            yield generation(style, 1, dtype)


def _workload(model: str) -> Workload:
    from tests.parity.every_plan import workload

    return replace(workload(model), num_layers=LAYERS)
