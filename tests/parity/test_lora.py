"""Adapters under every kind of plan: the losses, gradient norms and weights of one card."""

import pytest

from ppfleetx.config.plan import ParallelPlan as Plan
from tests.parity.comparison import TOLERANCE

LORA = {"Model.lora.rank": 4, "Model.lora.alpha": 16.0}
PLANS = [
    Plan(dp=2),
    Plan(mp=2),
    Plan(mp=2, sequence_parallel=True),
    Plan(sep=2),
    Plan(pp=2),
    Plan(sharding=2, sharding_stage=1),
    Plan(sharding=2, sharding_stage=2),
    Plan(sharding=2, sharding_stage=3),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_adapters_train_as_on_one_card(comparison, plan):
    found = comparison.run(plan, "llama" if plan.mp > 1 else "gpt", "sgd", extra=LORA)
    assert found.first == 0.0
    assert found.worst <= TOLERANCE, str(found)


@pytest.mark.parametrize("plan", [Plan(mp=2), Plan(sharding=2, sharding_stage=3)], ids=str)
def test_recomputation_reaches_adapters_beside_frozen_weights(comparison, plan):
    """The first block is given what carries no gradient of its own."""
    found = comparison.run(plan, "gpt", "sgd", extra={**LORA, "Model.use_recompute": True})
    plain, _ = comparison.reference("gpt", "sgd", 8, extra=LORA)
    recomputed, _ = comparison.reference("gpt", "sgd", 8, extra={**LORA, "Model.use_recompute": True})
    assert recomputed["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert found.worst <= TOLERANCE, str(found)


def test_only_adapters_change(comparison, tmp_path):
    """With the base frozen the loss still falls, and the gradient norm is that of the adapters alone."""
    result, directory = comparison.reference("gpt", "sgd", 8, extra=LORA)
    import numpy as np

    with np.load(f"{directory}/first.npz") as first, np.load(f"{directory}/last.npz") as last:
        changed = {name for name in first.files if (first[name] != last[name]).any()}
        adapters = {name for name in first.files if ".lora." in name}
    assert changed == adapters
    assert len(adapters) == 8 * 4 * 2
    assert result["loss"][-1] < result["loss"][0]
