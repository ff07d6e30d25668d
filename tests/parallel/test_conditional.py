"""Data that leave a layer out on some ranks, in some micro batches, change nothing about what is sent."""

import pytest

from ppfleetx.config.plan import ParallelPlan as Plan
from tests.parity.comparison import fields_of

TRAIN = "tests.parallel.conditional:train"


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2),
        Plan(sharding=2),
        Plan(sharding=2, sharding_stage=2),
        Plan(sharding=2, sharding_stage=3),
        Plan(pp=2, sharding=2, sharding_stage=3, pp_schedule="zb_h1"),
    ],
    ids=str,
)
def test_a_layer_that_only_some_batches_use(comparison, plan):
    (one,) = comparison.pools(1).run(TRAIN, plan={}, world_size=1, micro_batch_size=1)
    size = plan.world_size
    ranks = comparison.pools(size).run(TRAIN, plan=fields_of(plan), world_size=size, micro_batch_size=1)
    assert all(rank == ranks[0] for rank in ranks)
    for found, expected in zip(ranks[0], one, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(sharding=2, sharding_stage=2),
        Plan(pp=2, sharding=2, sharding_stage=2),
    ],
    ids=str,
)
def test_a_weight_whose_gradient_comes_after_that_of_the_input(comparison, plan):
    options = {"micro_batch_size": 1, "name": "WideGPT"}
    (one,) = comparison.pools(1).run(TRAIN, plan={}, world_size=1, **options)
    ranks = comparison.pools(plan.world_size).run(
        TRAIN, plan=fields_of(plan), world_size=plan.world_size, **options
    )
    for found, expected in zip(ranks[0], one, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
