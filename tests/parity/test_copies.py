"""Copies of a parameter stay equal to the bit whatever the last bits of their gradients are."""

import pytest

from ppfleetx.config.plan import ParallelPlan as Plan

SMALL = {"Model.num_layers": 2}
LORA = {**SMALL, "Model.lora.rank": 4, "Model.lora.alpha": 16.0}
POSITIONS, NORM, EMBEDDING = (
    "embedding.position_embeddings.weight",
    "decoder.final_norm.weight",
    "embedding.word_embeddings.weight",
)
PLANS = [
    (Plan(mp=2), SMALL, POSITIONS),
    (Plan(mp=2, sequence_parallel=True), SMALL, POSITIONS),
    (Plan(sep=2), SMALL, POSITIONS),
    (Plan(dp=2), SMALL, POSITIONS),
    *((Plan(sharding=2, sharding_stage=stage), SMALL, POSITIONS) for stage in (1, 3)),
    (Plan(pp=2, virtual_pp_degree=2), {"Model.num_layers": 4}, EMBEDDING),
    (Plan(mp=2), LORA, "decoder.layers.0.attention.qkv.lora.a"),
    (Plan(mp=2, sequence_parallel=True), LORA, "decoder.layers.1.mlp.fc2.lora.b"),
    (Plan(mp=2, pp=2), SMALL, EMBEDDING),
    (Plan(mp=2, pp=2, sequence_parallel=True), SMALL, NORM),
    (Plan(dp=2, mp=2, sequence_parallel=True), SMALL, NORM),
    (Plan(sep=2, mp=2), SMALL, POSITIONS),
    (Plan(sharding=2, mp=2, sharding_stage=3), SMALL, POSITIONS),
    (Plan(sharding=2, pp=2, sharding_stage=2), SMALL, EMBEDDING),
]


NAMES = [f"{plan}{', LoRA' if extra is LORA else ''}" for plan, extra, _ in PLANS]


@pytest.mark.parametrize(("plan", "extra", "copied"), PLANS, ids=NAMES)
def test_one_ulp_on_one_rank(comparison, plan, extra, copied):
    ranks = comparison.pools.run(
        plan,
        "tests.parity.noise:copies_after_a_noisy_step",
        extra=extra,
    )
    assert any(copied in rank["copied"] for rank in ranks), "nothing to be made equal"
    assert sum(rank["changed"] for rank in ranks) >= len({name for r in ranks for name in r["copied"]})
    assert [rank["message"] for rank in ranks] == [""] * plan.world_size
