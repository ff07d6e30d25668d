"""Blocks of GPT-NeoX, Qwen3 and Mistral under every way of cutting; ``make parity`` runs more plans."""

import pytest

from ppfleetx.config.plan import ParallelPlan as Plan
from tests.parity.comparison import TOLERANCE

PLANS = [
    Plan(mp=2),
    Plan(mp=2, sequence_parallel=True),
    Plan(sep=2),
    Plan(pp=2, virtual_pp_degree=2),
    Plan(sharding=2, sharding_stage=3),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_mixed_block_trains_as_on_one_card(comparison, plan):
    extra = {"Model.use_recompute": True, "Model.recompute_granularity": "full_attn"}
    if plan.pp == 1:
        extra["Model.num_layers"] = 2
    found = comparison.run(plan, "mixed", "sgd", extra=extra)
    assert found.first == 0.0
    assert found.worst <= TOLERANCE, str(found)


@pytest.mark.parametrize("key", ["Model.parallel_residual", "Model.qk_layernorm"])
def test_each_changes_the_losses(comparison, key):
    layers = {"Model.num_layers": 2}
    mixed, _ = comparison.reference("mixed", "sgd", 8, extra=layers)
    other, _ = comparison.reference("mixed", "sgd", 8, extra={**layers, key: False})
    assert mixed["loss"][0] != pytest.approx(other["loss"][0], rel=1e-5)
