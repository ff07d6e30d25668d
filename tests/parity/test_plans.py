"""A choice of plans equals one card, plain and with options; ``make parity`` runs all plans.

Every run has accumulation, clipping, weight decay, warm-up, and padding that differs between micro
batches and ranks; the first and last numbers compared are evaluations.
"""

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from ppfleetx.nn.cpu_ops import bfloat16
from tests.parity import pruned, qat
from tests.parity.comparison import BFLOAT16_TOLERANCE, IN_BFLOAT16
from tests.parity.variants import WINDOWED

MP, SP, SEP, PP = Plan(mp=2), Plan(mp=2, sequence_parallel=True), Plan(sep=2), Plan(pp=2)
STAGE_3, INTERLEAVED = Plan(sharding=2, sharding_stage=3), Plan(pp=2, virtual_pp_degree=2)
PLANS = [
    Plan(dp=2), MP, SP, PP, SEP, Plan(sharding=2), Plan(sharding=2, sharding_stage=2), STAGE_3,
    Plan(dp=2, mp=2, sequence_parallel=True), Plan(pp=4, virtual_pp_degree=2), INTERLEAVED,
    Plan(pp=2, mp=2, sequence_parallel=True), Plan(pp=2, sharding=2, sharding_stage=3),
    Plan(mp=2, sep=2, sequence_parallel=True), Plan(dp=2, pp=2, mp=2),
    Plan(pp=2, sharding=2, sharding_stage=2, sharding_offload=True),
    Plan(pp=2, sharding=2, sharding_stage=3, pp_schedule="zb_h1"),
]  # fmt: skip


# Both models where heads or vocabulary are divided over several axes; elsewhere they take turns.
BOTH = [MP, SEP, PP, Plan(mp=2, sep=2, sequence_parallel=True)]
TURNS = [(plan, ("gpt", "llama")[number % 2]) for number, plan in enumerate(PLANS) if plan not in BOTH]


@pytest.mark.slow_after(8)
@pytest.mark.parametrize(
    ("plan", "model"), [*TURNS, *((plan, model) for plan in BOTH for model in ("gpt", "llama"))], ids=str
)
def test_loss_and_gradient_norm(comparison, plan, model):
    comparison.check(plan, model, "adamw")


@pytest.mark.parametrize("plan", [SP, PP, STAGE_3], ids=str)
def test_factors_of_rates_by_width(comparison, plan):
    comparison.check(plan, "llama", "adamw", extra={**SMALL, "Model.mup_base_width": 8})


def test_factors_of_rates_change_steps_and_nothing_before_them(comparison):
    same = {"Model.embedding_initializer_range": 0.2}  # and matrices start alike
    wide = {"Model.mup_base_width": 8, "Model.logits_multiplier": 4.0, "Model.initializer_range": 0.4}
    ours, plain = (
        comparison.reference("gpt", "adamw", 8, extra={**SMALL, **same, **keys})[0]["loss"]
        for keys in (wide, {})
    )
    assert ours[0] == plain[0]
    assert ours[-1] != pytest.approx(plain[-1], rel=1e-5)


def recompute(granularity="full"):
    return {"Model.use_recompute": True, "Model.recompute_granularity": granularity}


def capacity(policy):
    return {
        "Model.moe": f"{{num_experts: 4, expert_ffn_size: 32, capacity: {{factor: 0.9, policy: {policy}}}}}"
    }


SMALL = {"Model.num_layers": 2}
YARN = {
    "Model.rope_scaling.type": "yarn",
    "Model.rope_scaling.factor": 4.0,
    "Model.rope_scaling.original_max_position_embeddings": 4,
    "Model.rope_scaling.beta_fast": 2.0,
}
# All rows are long; a rank along sep has only the first 8 of their 16 positions.
LONGROPE = {
    "Model.rope_scaling.type": "longrope",
    "Model.rope_scaling.factor": 2.0,
    "Model.rope_scaling.original_max_position_embeddings": 12,
    "Model.rope_scaling.short_factor": "[1.0, 1.5]",
    "Model.rope_scaling.long_factor": "[2.5, 0.75]",
}
WINDOW = {"Model.attention_window": 5, "Model.rotary_percent": 0.5, "Model.embedding_initializer_range": 0.4}
LORA = {"Model.lora.rank": 4, "Model.lora.alpha": 16.0}
# Of the 16 positions, or the 8 of a sequence-parallel or sep rank, which 3 does not divide.
CHUNKS = {**SMALL, "Model.loss_chunks": 3}
SIX_HEADS = {
    "Model.num_attention_heads": 6,
    "Model.ffn_hidden_size": 66,
    "Model.vocab_size_divisible_unit": 129,
}
DROPOUT = {"Model.hidden_dropout_prob": 0.2, "Model.attention_probs_dropout_prob": 0.2}
ALIKE = {"steps": 2, "micro_batch_size": 4, "reference_micro_batch_size": 4}
GATHERED = {"train": "tests.parity.variants:train_with_gathered_keys"}
DIFFERENT_BLOCKS = {"train": "tests.parity.variants:train_windowed"}
EXPERT_PLANS = [
    (Plan(dp=2, ep=2), {}),
    (Plan(dp=2, ep=2), recompute()),
    (MP, {}),
    (Plan(mp=2, ep=2, expert_mp=1, sequence_parallel=True), recompute()),
    (Plan(sep=2, ep=2), {"Model.loss_chunks": 2}),
    (Plan(sharding=2, sharding_stage=3, ep=2), recompute()),
    (Plan(dp=2, mp=2, ep=2), {}),
    (Plan(sharding=4, sharding_stage=2, ep=2), {"Distributed.sharding.reduce_overlap": False}),
    (Plan(dp=2, pp=2, ep=2), {"Distributed.overlap_p2p_comm": True}),
    (Plan(dp=2, pp=2, ep=2, virtual_pp_degree=2), {}),
    (Plan(dp=2, pp=2, ep=2, pp_schedule="zb_h1"), {}),
]
WAYS = {
    "final weights": [(plan, "gpt", {}) for plan in (PP, Plan(sharding=2), *PLANS[8::2])],
    "uneven stages": [
        (plan, "gpt", {})
        for plan in (
            Plan(pp=2, pp_layers=(3, 5)),
            Plan(pp=2, pp_layers=(0, 8)),
            Plan(pp=4, pp_layers=(4, 0, 4, 0)),
            Plan(pp=4, virtual_pp_degree=2, pp_layers=(1, 2, 0, 2, 1, 1, 1, 0)),
            Plan(pp=2, virtual_pp_degree=2, pp_layers=(1, 3, 0, 4)),
        )
    ],
    # With 8 micro batches Paddle interleaves; with as many as stages it runs all forward passes first.
    "interleaved": [
        (plan, "gpt", {"micro_batch_size": 2})
        for plan in (Plan(pp=4, virtual_pp_degree=2), Plan(pp=2, virtual_pp_degree=4))
    ],
    "a degree that is no power of two": [(Plan(mp=3), "gpt", {"extra": SIX_HEADS})],
    "recomputed": [
        (plan, "llama", {"extra": recompute(granularity), "steps": 2})
        for plan in (SP, Plan(pp=2, sharding=2, sharding_stage=3), SEP)
        for granularity in ("full", "full_attn", "core_attn")
    ],
    "replicas of a pipeline": [
        (Plan(dp=2, pp=2), model, {"extra": {**SMALL, **recompute()}}) for model in ("gpt", "llama")
    ],
    # Passengers of the pipeline, and positions of whole sequences, arrive where attention needs them.
    "packed documents": [
        (plan, "llama", {"documents": True, "steps": 2, "extra": recompute()})
        for plan in (SEP, Plan(pp=2, mp=2, sequence_parallel=True))
    ],
    "yarn": [(plan, "llama", {"extra": {**SMALL, **YARN, **recompute()}}) for plan in (SP, SEP, PP)],
    "longrope": [
        (plan, model, {"steps": 2, "extra": {**SMALL, **LONGROPE, **recompute()}})
        for plan, model in ((SP, "llama"), (SEP, "llama"), (PP, "llama"), (SEP, "latent"))
    ],
    "window": [
        (plan, "llama", {"extra": {**SMALL, **WINDOW, **recompute("core_attn")}}) for plan in (SP, SEP, PP)
    ],
    "mixed": [
        (plan, "mixed", {"extra": {**({} if plan is INTERLEAVED else SMALL), **recompute("full_attn")}})
        for plan in (MP, SP, SEP, INTERLEAVED, STAGE_3)
    ],
    "gemma": [(plan, "gemma", {}) for plan in (SP, SEP, INTERLEAVED)],
    "olmo": [(plan, "olmo", {"extra": SMALL}) for plan in (SP, SEP)],
    "stablelm": [(plan, "stablelm", {"extra": SMALL}) for plan in (SP, SEP)],
    "alibi": [(plan, "alibi", {"extra": SMALL}) for plan in (SP, SEP)],
    # Adapters under data parallelism and the other stages of sharding: tests/e2e/test_finetuning.py.
    "adapters": [
        (plan, model, {"extra": {**SMALL, **LORA, **more}})
        for plan, model, more in (
            (MP, "llama", {}),
            (SEP, "gpt", {}),
            (PP, "gpt", {}),
            (STAGE_3, "gpt", recompute()),
        )
    ],
    "latent": [
        (plan, "latent", {"documents": True, "extra": {**SMALL, **more}})
        for plan, more in (
            (MP, {"Model.attention_window": 5}),
            (SP, recompute("core_attn")),
            (SEP, {"Model.latent_attention.q_rank": "null"}),
            (PP, recompute("full_attn")),
            (STAGE_3, {}),
            (Plan(mp=2, sep=2, sequence_parallel=True), {"Model.add_bias_linear": True}),
            (Plan(pp=2, mp=2, pp_schedule="zb_h1"), {}),
        )
    ],
    "loss in chunks": [
        (plan, model, {"extra": CHUNKS})
        for plan, model in (
            (SP, "gpt"),
            (MP, "llama"),
            (PP, "gpt"),
            (SEP, "llama"),
            (STAGE_3, "gpt"),
            (STAGE_3, "llama"),
        )
    ],
    # A pipeline drops what one card drops.
    "dropout": [
        (plan, "gpt", {"extra": DROPOUT, **ALIKE})
        for plan in (PP, Plan(pp=4, virtual_pp_degree=2), INTERLEAVED, Plan(pp=2, pp_layers=(3, 5)))
    ],
    "experts": [
        (plan, ("moe", "moe_bias")[number % 2], {"of_plan": extra})
        for number, (plan, extra) in enumerate(EXPERT_PLANS)
    ],
    # What is dropped does not depend on the plan.
    "capacity": [
        (plan, "moe", {"extra": capacity(policy)})
        for plan in (Plan(sep=2, ep=2), MP, Plan(mp=2, sep=2, ep=4, sequence_parallel=True, expert_mp=1))
        for policy in ("probs", "position")
    ],
    # Adapted by a plugin: `examples/gathered_attention.py`.
    "attention strategy": [
        (plan, model, {**GATHERED, "extra": {"Model.name": "GatheredGPT"}, **more})
        for plan, model, more in (
            (SEP, "gpt", {}),
            (SEP, "llama", {"documents": True}),
            (Plan(sep=2, mp=2), "mixed", {}),
        )
    ],
    "different blocks": [
        (plan, "llama", {**DIFFERENT_BLOCKS, "extra": {"Model.name": WINDOWED, "Model.num_layers": 4}})
        for plan in (MP, PP, SEP)
    ],
    "pruned": [
        (plan, model, pruned.options("along a schedule"))
        for plan, model in (
            (MP, "mixed"),
            (SEP, "llama"),
            (Plan(sharding=2, sharding_stage=2), "gpt"),
            (STAGE_3, "llama"),
            (INTERLEAVED, "llama"),
        )
    ],
    "quantized": [
        (plan, "gpt", qat.options(form))
        for plan, form in (
            (SP, "PACT"),
            (Plan(mp=2, sep=2), "per channel, each token"),
            (PP, "frozen embedding, 5 bits"),
            (Plan(mp=2, sharding=2, sharding_stage=3), "per tensor, moving average"),
            (Plan(sharding=2, sharding_stage=2), "PACT"),  # bounds are float32, weights are not
        )
    ],
}


# The first case of each way comes first, the second ones next, ...
IN_TURNS = sorted(
    ((number, way, case) for way, cases in WAYS.items() for number, case in enumerate(cases)),
    key=lambda turn: turn[0],
)


@pytest.mark.slow_after(len(WAYS) + 3)
@pytest.mark.parametrize(
    ("plan", "model", "options"),
    [
        pytest.param(*case, id=f"{way}: {case[1]}, {case[0]}{case[0].pp_layers or ''}")
        for _, way, case in IN_TURNS
    ],
)
def test_weights_too(comparison, plan, model, options):
    comparison.check(plan, model, **options)


@pytest.mark.parametrize(
    ("stage", "divided"),
    [
        (1, {"states", "gradients"}),  # gradients: from the end of the backward pass on
        (2, {"states", "gradients"}),
        (3, {"states", "gradients", "values"}),
    ],
)
def test_what_two_ranks_hold_by_stage_of_sharding(comparison, stage, divided):
    plan = Plan(sharding=2, sharding_stage=stage)
    first, second = comparison.pools.run(plan, "tests.parity.training:held_after_step")
    for what in ("values", "gradients", "states"):
        if what in divided:
            assert first[what] + second[what] == pytest.approx(1.0), "each element has one owner"
            assert first[what] == pytest.approx(0.5, abs=0.02)
        else:
            assert first[what] == second[what] == 1.0


@pytest.mark.skipif(not bfloat16.are_available(), reason="this CPU has no bfloat16 products")
@pytest.mark.parametrize(
    ("plan", "model"),
    [
        (Plan(mp=2, sequence_parallel=True), "llama"),
        (Plan(pp=2), "gpt"),
        (Plan(sharding=2, sharding_stage=3), "gpt"),
        (Plan(pp=2, dp=2, pp_schedule="zb_h1"), "llama"),
        (Plan(dp=2), "moe"),
    ],
    ids=str,
)
def test_products_in_bfloat16(comparison, plan, model):
    difference = comparison.run(plan, model, "sgd", extra=IN_BFLOAT16)
    assert difference.first == 0
    assert 0 < difference.worst <= BFLOAT16_TOLERANCE, difference


@pytest.mark.skipif(not bfloat16.are_available(), reason="this CPU has no bfloat16 products")
@pytest.mark.parametrize("plan", [Plan(), Plan(sharding=2, sharding_stage=3)], ids=str)
def test_a_resumed_run_in_bfloat16_repeats_every_bit(comparison, tmp_path, plan):
    whole = comparison.train_part(plan, 0, 4, extra=IN_BFLOAT16, save_to=str(tmp_path / "whole"))
    first = comparison.train_part(plan, 0, 2, extra=IN_BFLOAT16, save_to=str(tmp_path / "half"))
    half = str(next((tmp_path / "half").glob("epoch*")))
    assert first + comparison.train_part(plan, 2, 4, extra=IN_BFLOAT16, load_from=half) == whole
