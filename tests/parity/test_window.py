"""A window, partly turned heads and embeddings with a spread of their own, under every way of cutting."""

import pytest

from ppfleetx.config.plan import ParallelPlan as Plan
from tests.parity.comparison import TOLERANCE

KEYS = {
    "Model.attention_window": 5,
    "Model.rotary_percent": 0.5,
    "Model.embedding_initializer_range": 0.4,
    "Model.num_layers": 2,
}
PLANS = [Plan(mp=2, sequence_parallel=True), Plan(sep=2), Plan(pp=2)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_model_with_a_window_trains_as_on_one_card(comparison, plan):
    extra = {**KEYS, "Model.use_recompute": True, "Model.recompute_granularity": "core_attn"}
    found = comparison.run(plan, "llama", "sgd", extra=extra)
    assert found.first == 0.0
    assert found.worst <= TOLERANCE, str(found)


@pytest.mark.parametrize("key", ["Model.attention_window", "Model.rotary_percent"])
def test_each_changes_the_losses(comparison, key):
    changed, _ = comparison.reference("llama", "sgd", 8, extra=KEYS)
    plain, _ = comparison.reference("llama", "sgd", 8, extra={k: v for k, v in KEYS.items() if k != key})
    assert changed["loss"][0] != pytest.approx(plain["loss"][0], rel=1e-5)
