"""Pruning while training equals one card; ``make parity`` runs all plans of tests/parity/pruned.py."""

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.helpers.ranks import Pools
from tests.parity import pruned
from tests.parity.comparison import TOLERANCE, Comparison, micro_batch_size_of

SCHEDULE = "along a schedule"
CHOICE = [
    (Plan(mp=2), "mixed"),
    (Plan(sep=2), "llama"),
    (Plan(sharding=2, sharding_stage=2), "gpt"),
    (Plan(sharding=2, sharding_stage=3), "llama"),
    (Plan(pp=2, virtual_pp_degree=2), "llama"),
]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    pools = Pools()
    yield Comparison(pools, tmp_path_factory.mktemp("pruned"), train=pruned.TRAIN)
    pools.close()


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("plan", "model"), CHOICE, ids=str)
def test_losses_gradients_and_weights(comparison, plan, model):
    comparison.check(plan, model, extra=pruned.FORMS[SCHEDULE])


PART = {
    "train": "tests.parity.pruned:train_part",
    "timeout": 120.0,
    "model": "llama",
    "extra": pruned.FORMS[SCHEDULE],
}


def test_plans_change_at_each_resumption(comparison, tmp_path):
    expected = comparison.train_part(Plan(), 0, 6, **PART)
    plans = (Plan(mp=2), Plan(sharding=2, sharding_stage=3), Plan(pp=2))
    assert comparison.train_along(plans, tmp_path, **PART) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("plan", [Plan(), Plan(mp=2), Plan(sharding=2, sharding_stage=2)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_master_weights_stay_zero_too(comparison, plan, dtype):
    results = comparison.pools.run(
        plan,
        "tests.parity.pruned:train_in_16_bits",
        timeout=120.0,
        micro_batch_size=micro_batch_size_of(plan),
        mix_precision={"dtype": dtype, "level": "O2", "scale_loss": 1024.0},
        extra={**pruned.FORMS[SCHEDULE], "Model.num_layers": 4},
    )
    assert "master_weight" in results[0]["states"]
    assert results[0]["error"] == ""
