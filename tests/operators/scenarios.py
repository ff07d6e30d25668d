"""The runs that make the table of kernels: a few for every test run, all for ``make operators``.

A kernel depends on model, precision, plan and options, mostly on two of these at once. So pairs are recorded,
not all combinations:

* one process: every model in every precision, and every option in every precision with two models; * two
processes: every plan in every precision, and every plan with every option it supports; * four processes:
every plan once, for pairs of axes.

The other choices in a pair take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle, product
from typing import Any

from ppfleetx.config.parallel_plan import ParallelPlan, Workload, enumerate_plans
from tests.helpers.ranks import fields_of
from tests.operators.options import OPTIONS, Option
from tests.parity.comparison import micro_batch_size_of
from tests.parity.training import MODELS, SEQ_LEN

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
GENERATIONS = {
    "greedy": ["Generation.decode_strategy=greedy_search", "Generation.repetition_penalty=1.2"],
    "sampling": ["Generation.num_return_sequences=2", "Generation.temperature=1.5", "Generation.top_p=0.9"],
    "top k": ["Generation.top_k=5", "Generation.min_dec_len=2"],
    "beam": ["Generation.decode_strategy=beam_search", "Generation.num_beams=3"],
    "groups": [
        *("Generation.decode_strategy=beam_search", "Generation.num_beams=4"),
        *("Generation.num_beam_groups=2", "Generation.diversity_rate=0.5"),
    ],
    "no cache": ["Generation.decode_strategy=greedy_search", "Generation.use_cache=False"],
    "forced": ["Generation.forced_bos_token_id=5", "Generation.forced_eos_token_id=6"],
    "guesses": [
        "Generation.prompt=the hat the cat the hat the",
        "Generation.decode_strategy=greedy_search",
        "Generation.max_dec_len=40",
    ],
}
DTYPES = ("float32", "float16", "bfloat16")
STYLES = ("gpt2", "llama")
SMALL = {
    "int8": {"to": "int8"},
    "int4": {"to": "int4", "group": 16},
    "w8a8": {"to": "int8", "activations": "int8"},
}
"""Quantized models of both styles: what they are made with."""
_WINDOWS = {"Offline_Eval.max_seq_len": SEQ_LEN, "Offline_Eval.overlapping_eval": 4}
_CLASSES = {"Model.module": "GPTFinetuneModule", "Model.num_classes": 2}
_FINETUNINGS = {
    "classes": ("SST2", _CLASSES),
    "classes, lora": ("SST2", {**_CLASSES, "Model.lora.rank": 4}),
    "a number": ("STSB", {**_CLASSES, "Model.num_classes": 1}),
}


@dataclass(frozen=True)
class Scenario:
    name: str
    case: str
    world: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)


def training(plan: ParallelPlan, model: str, precision: str, option: str = "") -> Scenario:
    """Steps and an evaluation under a plan."""
    chosen = OPTIONS[option] if option else Option()
    arguments = _arguments(plan, model, precision, chosen.keys) | chosen.batches
    name = ", ".join([model, str(plan), precision, *([option] if option else [])])
    return Scenario(name, "kernels_of_training", plan.world_size, arguments)


def evaluation(plan: ParallelPlan, model: str, precision: str, *, cloze: bool) -> Scenario:
    """A batch of an offline evaluation, by perplexity or cloze."""
    extra = {"Model.module": "GPTEvalModule", "Offline_Eval.cloze_eval": cloze, **_WINDOWS}
    arguments = _arguments(plan, model, precision, extra)
    kind = "cloze" if cloze else "perplexity"
    return Scenario(
        f"{kind}, {model}, {plan}, {precision}", "kernels_of_evaluation", plan.world_size, arguments
    )


def finetuning(plan: ParallelPlan, precision: str, kind: str = "classes") -> Scenario:
    """A classifier, or a regression."""
    task, extra = _FINETUNINGS[kind]
    arguments = _arguments(plan, "gpt", precision, extra) | {"task": task}
    del arguments["model"]
    return Scenario(
        f"finetuning, {kind}, {plan}, {precision}", "kernels_of_finetuning", plan.world_size, arguments
    )


def generation(style: str, world: int, dtype: str) -> Scenario:
    """Every decoding strategy, from the run of this style in ``directory``."""
    plan = [f"Distributed.mp_degree={world}"] if world > 1 else []
    arguments = {"directory": style, "plan": plan, "world": world, "dtype": dtype}
    return Scenario(f"generation, {style}, {world} ranks, {dtype}", "kernels_of_generation", world, arguments)


def few() -> Iterator[Scenario]:
    """One scenario of each kind, for every test run."""
    one, two = ParallelPlan(), ParallelPlan
    yield training(one, "gpt", "float32", "documents")
    yield training(one, "llama", "bfloat16 O2", "recompute")
    yield training(one, "mixed", "float16 O1", "dropout")
    yield training(two(mp=2, sequence_parallel=True), "gpt", "bfloat16 O2", "pieces, documents")
    yield training(two(pp=2), "llama", "float32")
    yield training(two(sharding=2, sharding_stage=3), "gpt", "float16 O2")
    yield finetuning(one, "float32")
    yield generation("gpt2", 1, "float32")


def everything(sizes: tuple[int, ...]) -> Iterator[Scenario]:
    """All scenarios with these numbers of processes (1, 2, 4)."""
    if 1 in sizes:
        yield from _of_one()
    if 2 in sizes:
        yield from _of_two()
    if 4 in sizes:
        for plan, model, precision in zip(plans(4), cycle(MODELS), cycle(PRECISIONS), strict=False):
            yield training(plan, model, precision)


def plans(size: int) -> list[ParallelPlan]:
    """The plans of the parity suite."""
    from tests.parity.every_plan import ZERO_BUBBLE, workload

    work: Workload = replace(workload("llama"), num_layers=LAYERS)
    return [*enumerate_plans(size, work), *(plan for plan in ZERO_BUBBLE if plan.world_size == size)]


def _of_one() -> Iterator[Scenario]:
    one = ParallelPlan()
    for precision in PRECISIONS:
        yield from (training(one, model, precision) for model in MODELS)
        for name, option in OPTIONS.items():
            if option.fits(one) and precision.endswith(option.level):
                yield from (training(one, model, precision, name) for model in option.models)
        yield from (finetuning(one, precision, kind) for kind in _FINETUNINGS)
        for model, cloze in product(MODELS, (False, True)):
            yield evaluation(one, model, precision, cloze=cloze)
    for style, dtype in product([*STYLES, *small_styles()], DTYPES):
        yield generation(style, 1, dtype)


def _of_two() -> Iterator[Scenario]:
    every = plans(2)
    for number, plan in enumerate(every):
        for turn, precision in enumerate(PRECISIONS):
            yield training(plan, [*MODELS][(number + turn) % len(MODELS)], precision)
        kind = [*_FINETUNINGS][number % len(_FINETUNINGS)]
        precision = [*PRECISIONS][number % len(PRECISIONS)]
        if plan.pp == plan.sep == 1:  # what classifiers run under
            yield finetuning(plan, precision, kind)
        for cloze in (False, True):
            yield evaluation(plan, [*MODELS][(number + cloze) % len(MODELS)], precision, cloze=cloze)
    for turn, (name, option) in enumerate(OPTIONS.items()):
        precisions = [precision for precision in PRECISIONS if precision.endswith(option.level)]
        for number, plan in enumerate(every if option.meets_plans else ()):
            if option.fits(plan):
                model = option.models[(number + turn) % len(option.models)]
                yield training(plan, model, precisions[(number + turn) % len(precisions)], name)
    for style, dtype in product([*STYLES, *small_styles()], DTYPES):
        yield generation(style, 2, dtype)


def small_styles() -> list[str]:
    """Names of the quantized models."""
    return [f"{style} {way}" for style, way in product(STYLES, SMALL)]


def _arguments(plan: ParallelPlan, model: str, precision: str, extra: dict[str, Any]) -> dict[str, Any]:
    # A head of 8: what flash attention takes.
    sizes = {"Model.num_layers": LAYERS if plan.num_chunks > 2 else 2, "Model.head_dim": 8}
    low = {f"Engine.mix_precision.{key}": value for key, value in PRECISIONS[precision].items()}
    return {
        "plan": fields_of(plan),
        "world_size": plan.world_size,
        "model": model,
        "micro_batch_size": micro_batch_size_of(plan),
        "extra": {**sizes, **low, **extra},
    }
