"""A choice of plans equals one card; ``make parity`` runs all of them.

Every run has accumulation, clipping, weight decay, warm-up, and padding that differs between micro
batches and ranks; the first and last numbers compared are evaluations.
"""

import pytest

from ppfleetx.config.plan import ParallelPlan as Plan
from ppfleetx.nn.cpu_ops import bfloat16
from tests.parity.comparison import BFLOAT16_TOLERANCE, IN_BFLOAT16, TOLERANCE

PLANS = [
    Plan(dp=2),
    Plan(mp=2),
    Plan(mp=2, sequence_parallel=True),
    Plan(pp=2),
    Plan(sep=2),
    Plan(sharding=2),
    Plan(sharding=2, sharding_stage=2),
    Plan(sharding=2, sharding_stage=3),
    Plan(dp=2, mp=2, sequence_parallel=True),
    Plan(pp=4, virtual_pp_degree=2),
    Plan(pp=2, virtual_pp_degree=2),
    Plan(pp=2, mp=2, sequence_parallel=True),
    Plan(pp=2, sharding=2, sharding_stage=3),
    Plan(mp=2, sep=2, sequence_parallel=True),
    Plan(dp=2, pp=2, mp=2),
    Plan(pp=2, sharding=2, sharding_stage=2, sharding_offload=True),
    Plan(pp=2, sharding=2, sharding_stage=3, pp_schedule="zb_h1"),
]


# Both models where heads or vocabulary are divided over several axes; elsewhere they take turns.
BOTH = [Plan(mp=2), Plan(sep=2), Plan(pp=2), Plan(mp=2, sep=2, sequence_parallel=True)]
TURNS = [(plan, ("gpt", "llama")[number % 2]) for number, plan in enumerate(PLANS) if plan not in BOTH]


@pytest.mark.parametrize(
    ("plan", "model"), [*TURNS, *((plan, model) for plan in BOTH for model in ("gpt", "llama"))], ids=str
)
def test_loss_and_gradient_norm(comparison, plan, model):
    difference = comparison.run(plan, model, "adamw")
    assert difference.first == 0, "initial weights differ"
    assert difference.worst <= TOLERANCE, difference


@pytest.mark.parametrize("plan", [Plan(pp=2), Plan(sharding=2), *PLANS[8::2]], ids=str)
def test_final_weights(comparison, plan):
    difference = comparison.run(plan, "gpt", "sgd")
    assert difference.worst <= TOLERANCE, difference


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pp=2, pp_layers=(3, 5)),
        Plan(pp=2, pp_layers=(0, 8)),
        Plan(pp=4, pp_layers=(4, 0, 4, 0)),
        Plan(pp=4, virtual_pp_degree=2, pp_layers=(1, 2, 0, 2, 1, 1, 1, 0)),
        Plan(pp=2, virtual_pp_degree=2, pp_layers=(1, 3, 0, 4)),
    ],
    ids=lambda plan: f"{plan}, {plan.pp_layers}",
)
def test_uneven_pipelines(comparison, plan):
    difference = comparison.run(plan, "gpt", "sgd")
    assert difference.first == 0
    assert difference.worst <= TOLERANCE, difference


@pytest.mark.parametrize("plan", [Plan(pp=4, virtual_pp_degree=2), Plan(pp=2, virtual_pp_degree=4)], ids=str)
def test_interleaved_schedule(comparison, plan):
    """With 8 micro batches Paddle interleaves; with as many as stages it runs all forward passes first."""
    difference = comparison.run(plan, "gpt", "sgd", micro_batch_size=2)
    assert difference.worst <= TOLERANCE, difference


def test_a_degree_that_is_no_power_of_two(comparison):
    sizes = {"num_attention_heads": 6, "ffn_hidden_size": 66, "vocab_size_divisible_unit": 129}
    extra = {f"Model.{key}": value for key, value in sizes.items()}
    difference = comparison.run(Plan(mp=3), "gpt", "sgd", extra=extra)
    assert difference.worst <= TOLERANCE, difference


@pytest.mark.parametrize("granularity", ["full", "full_attn", "core_attn"])
@pytest.mark.parametrize(
    "plan",
    [Plan(mp=2, sequence_parallel=True), Plan(pp=2, sharding=2, sharding_stage=3), Plan(sep=2)],
    ids=str,
)
def test_recomputation(comparison, plan, granularity):
    extra = {"Model.use_recompute": True, "Model.recompute_granularity": granularity}
    difference = comparison.run(plan, "llama", "sgd", extra=extra, steps=2)
    assert difference.worst <= TOLERANCE, difference


@pytest.mark.parametrize("plan", [Plan(sep=2), Plan(pp=2, mp=2, sequence_parallel=True)], ids=str)
def test_packed_documents(comparison, plan):
    """Passengers of the pipeline, and positions of whole sequences, arrive where attention needs them."""
    extra = {"Model.use_recompute": True}
    difference = comparison.run(plan, "llama", "sgd", documents=True, steps=2, extra=extra)
    assert difference.worst <= TOLERANCE, difference


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
