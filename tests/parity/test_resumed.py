"""Runs of experts, of rounding and of pruning that go from plan to plan; ``make parity`` has more pairs.

``test_plans.py`` has plans one by one.
"""

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.parity import pruned, qat
from tests.parity.comparison import TOLERANCE, micro_batch_size_of
from tests.parity.experts import RESUMED, resumed


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("pair", RESUMED[4:7], ids=lambda pair: " -> ".join(map(str, pair)))
def test_experts(comparison, tmp_path, pair):
    assert resumed(comparison, pair, tmp_path) <= TOLERANCE


STAGE_3 = Plan(sharding=2, sharding_stage=3)


@pytest.mark.parametrize(
    ("plans", "options"),
    [
        ((Plan(mp=2, pp=2), STAGE_3, Plan()), qat.options("per tensor, moving average")),
        ((Plan(mp=2), STAGE_3, Plan(pp=2)), pruned.PART),
    ],
    ids=["scales belong to the model", "pruned"],
)
def test_plans_change_at_each_resumption(comparison, tmp_path, plans, options):
    expected = comparison.train_part(Plan(), 0, 6, **options)
    assert comparison.train_along(plans, tmp_path, **options) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_learned_clips_without_a_gradient_yet_pass_the_fused_optimizer(comparison, stage):
    """Operators are fused in float32 only, where a sum in another order may round to the next grid point."""
    plan = Plan(sharding=2, sharding_stage=stage)
    expected, numbers = (comparison.train_part(p, 0, 3, extra=qat.FORMS["PACT"]) for p in (Plan(), plan))
    assert numbers == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("plan", [Plan(), Plan(mp=2), Plan(sharding=2, sharding_stage=2)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_master_weights_stay_zero_too(comparison, plan, dtype):
    results = comparison.pools.run(
        plan,
        "tests.parity.pruned:train_in_16_bits",
        micro_batch_size=micro_batch_size_of(plan),
        mix_precision={"dtype": dtype, "level": "O2", "scale_loss": 1024.0},
        extra={**pruned.PART["extra"], "Model.num_layers": 4},
    )
    assert "master_weight" in results[0]["states"]
    assert results[0]["error"] == ""
