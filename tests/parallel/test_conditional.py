"""Data that leave a layer out on some ranks, in some micro batches, change nothing about what is sent."""

import functools

import pytest

from ppfleetx.config.plan import ParallelPlan as Plan

TRAIN = "tests.parallel.conditional:train"


RANKS = [Plan(dp=2), *(Plan(sharding=2, sharding_stage=stage) for stage in (1, 2, 3))]


@pytest.fixture(scope="module")
def on_one_card(comparison):
    """Losses and gradient norms of a model, by its name."""
    return functools.cache(lambda name: comparison.pools.run(Plan(), TRAIN, micro_batch_size=1, name=name)[0])


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *(("ConditionalGPT", plan) for plan in RANKS),
        ("ConditionalGPT", Plan(pp=2, sharding=2, sharding_stage=3, pp_schedule="zb_h1")),
        ("WideGPT", Plan(sharding=2, sharding_stage=2)),
        ("WideGPT", Plan(pp=2, sharding=2, sharding_stage=2)),
    ],
    ids=str,
)
def test_plans_give_what_one_card_gives(comparison, on_one_card, name, plan):
    """A layer that only some batches use, and a weight whose gradient comes after that of the input."""
    ranks = comparison.pools.run(plan, TRAIN, micro_batch_size=1, name=name)
    assert all(rank == ranks[0] for rank in ranks)
    for found, expected in zip(ranks[0], on_one_card(name), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
