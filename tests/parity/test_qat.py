"""Quantization-aware training that goes from plan to plan; ``test_plans.py`` has plans one by one."""

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.parity import qat
from tests.parity.comparison import TOLERANCE


def test_scales_belong_to_the_model_and_go_from_plan_to_plan(comparison, tmp_path):
    options = qat.options("per tensor, moving average")
    expected = comparison.train_part(Plan(), 0, 6, **options)
    plans = (Plan(mp=2, pp=2), Plan(sharding=2, sharding_stage=3), Plan())
    assert comparison.train_along(plans, tmp_path, **options) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_learned_clips_without_a_gradient_yet_pass_the_fused_optimizer(comparison, stage):
    """Operators are fused in float32 only, where a sum in another order may round to the next grid point."""
    plan = Plan(sharding=2, sharding_stage=stage)
    expected, numbers = (comparison.train_part(p, 0, 3, extra=qat.FORMS["PACT"]) for p in (Plan(), plan))
    assert numbers == pytest.approx(expected, rel=1e-3)
