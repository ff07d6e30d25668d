"""Adapters under every kind of plan: the losses, gradient norms and weights of one card."""

import numpy as np
import pytest

from ppfleetx.config.plan import ParallelPlan as Plan
from tests.parity.comparison import TOLERANCE

LORA = {"Model.lora.rank": 4, "Model.lora.alpha": 16.0, "Model.num_layers": 2}
# Data and sequence parallelism and the other stages of sharding: tests/e2e/test_finetuning.py; stage 3 below.
PLANS = [Plan(mp=2), Plan(sep=2), Plan(pp=2)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_adapters_train_as_on_one_card(comparison, plan):
    found = comparison.run(plan, "llama" if plan.mp > 1 else "gpt", "sgd", extra=LORA)
    assert found.first == 0.0
    assert found.worst <= TOLERANCE, str(found)


def test_recomputation_reaches_adapters_beside_frozen_weights(comparison):
    """The first block is given what carries no gradient of its own."""
    recompute = {**LORA, "Model.use_recompute": True}
    plain, _ = comparison.reference("gpt", "sgd", 8, extra=LORA)
    recomputed, _ = comparison.reference("gpt", "sgd", 8, extra=recompute)
    assert recomputed["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    found = comparison.run(Plan(sharding=2, sharding_stage=3), "gpt", "sgd", extra=recompute)
    assert found.worst <= TOLERANCE, str(found)


def test_only_adapters_change(comparison):
    result, directory = comparison.reference("gpt", "sgd", 8, extra=LORA)
    with np.load(f"{directory}/first.npz") as first, np.load(f"{directory}/last.npz") as last:
        changed = {name for name in first.files if (first[name] != last[name]).any()}
        adapters = {name for name in first.files if ".lora." in name}
    assert changed == adapters
    assert len(adapters) == 2 * 4 * 2
    assert result["loss"][-1] < result["loss"][0]
