"""Each stage of sharding divides what it should."""

import pytest

from ppfleetx.config.plan import ParallelPlan as Plan


@pytest.mark.parametrize(
    ("stage", "divided"),
    [
        (1, {"states", "gradients"}),  # gradients: from the end of the backward pass on
        (2, {"states", "gradients"}),
        (3, {"states", "gradients", "values"}),
    ],
)
def test_what_two_ranks_hold(comparison, stage, divided):
    plan = Plan(sharding=2, sharding_stage=stage)
    first, second = comparison.pools.run(
        plan,
        "tests.parity.training:held_after_step",
    )
    for what in ("values", "gradients", "states"):
        if what in divided:
            assert first[what] + second[what] == pytest.approx(1.0), "each element has one owner"
            assert first[what] == pytest.approx(0.5, abs=0.02)
        else:
            assert first[what] == second[what] == 1.0
