"""Stretched rotary positions under every way of cutting a sequence or a head, and recomputed."""

import pytest

from ppfleetx.config.plan import ParallelPlan as Plan
from tests.parity.comparison import TOLERANCE

YARN = {
    "Model.rope_scaling.type": "yarn",
    "Model.rope_scaling.factor": 4.0,
    "Model.rope_scaling.original_max_position_embeddings": 4,
    "Model.rope_scaling.beta_fast": 2.0,
    "Model.num_layers": 2,
}
PLANS = [Plan(mp=2, sequence_parallel=True), Plan(sep=2), Plan(pp=2)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_stretched_model_trains_as_on_one_card(comparison, plan):
    extra = {**YARN, "Model.use_recompute": True}
    found = comparison.run(plan, "llama", "sgd", extra=extra)
    assert found.first == 0.0
    assert found.worst <= TOLERANCE, str(found)


def test_the_scaling_changes_the_losses(comparison):
    stretched, _ = comparison.reference("llama", "sgd", 8, extra=YARN)
    plain, _ = comparison.reference("llama", "sgd", 8, extra={"Model.num_layers": 2})
    assert stretched["loss"][0] != pytest.approx(plain["loss"][0], rel=1e-5)
