"""Every legal plan of the visible cards against one card."""

import pytest

from ppfleetx.config.plan import ParallelPlan as Plan
from ppfleetx.config.plan import enumerate_plans
from tests.device.place import deterministic, place
from tests.parity.comparison import fields_of, micro_batch_size_of
from tests.parity.every_plan import workload

pytestmark = pytest.mark.device

MODELS = ("gpt", "llama", "mixed")
PLANS = [
    pytest.param(plan, model, id=f"{model}: {plan}")
    for size in place().sizes(start=2)
    for model in MODELS
    if model != "mixed" or size <= 4
    for plan in enumerate_plans(size, workload(model))
] or [pytest.param(Plan(dp=2), "gpt", id="two cards")]
HALF_PLANS = [one for one in PLANS if one.values[1] != "mixed"]
# Relative. A card adds in another order than itself for other shapes; a wrong plan is wrong by 1e-3 and more.
TOLERANCE = 5e-5
HALF_TOLERANCE = 4e-3
"""bfloat16 O2, losses alone: its rounding step. Plans round at different places."""


@pytest.mark.parametrize(("plan", "model"), PLANS)
def test_float32(comparison, need_cards, device, record_property, plan, model):
    need_cards(plan.world_size)
    for optimizer in ("adamw", "sgd"):
        found = comparison.run(plan, model, optimizer, extra={"Global.device": device})
        record_property(optimizer, str(found))
        assert found.first == 0, "initial weights"
        assert found.worst <= TOLERANCE, found


@pytest.mark.parametrize(("plan", "model"), HALF_PLANS)
def test_bfloat16(comparison, need_cards, need_type, device, record_property, plan, model):
    need_cards(plan.world_size)
    need_type("bfloat16")
    expected, results = (
        comparison.pools(each.world_size).run(
            "tests.device.cases.training:train_in_16_bits",
            timeout=300.0,
            plan=fields_of(each),
            world_size=each.world_size,
            model=model,
            micro_batch_size=micro_batch_size_of(each),
            mix_precision={"dtype": "bfloat16", "level": "O2"},
            steps=3,
            extra={"Global.device": device, "Model.head_dim": 8},  # which flash attention serves
        )
        for each in (Plan(), plan)
    )
    for result in results:
        assert result["misrounded"] == [] and result["error"] == ""
        assert result["loss"] == results[0]["loss"], "ranks tell different losses"
    pairs = zip(results[0]["loss"], expected[0]["loss"], strict=True)
    found = max(abs(a - b) / abs(b) for a, b in pairs)
    record_property("loss", found)
    assert found <= HALF_TOLERANCE


@pytest.mark.parametrize("stage", [2, 3])
def test_offload_repeats_and_stays_close(comparison, need_cards, device, record_property, stage):
    """States in host memory: the CPU's kernel updates. Twice the same bits; the card's kernel may round
    otherwise."""
    need_cards(2)
    plans = [Plan(sharding=2, sharding_stage=stage, sharding_offload=on) for on in (False, True, True)]
    plain, one, other = (
        comparison.pools(2).run(
            "tests.device.cases.training:train_in_16_bits",
            timeout=300.0,
            plan=fields_of(plan),
            world_size=2,
            micro_batch_size=4,
            mix_precision={"enable": False},
            steps=4,
            extra={"Global.device": device, **deterministic(device)},
        )
        for plan in plans
    )
    assert one == other, "the same run twice"
    pairs = zip(plain[0]["loss"], one[0]["loss"], strict=True)
    found = max(abs(a - b) / abs(a) for a, b in pairs)
    record_property("loss", found)
    assert found <= TOLERANCE
