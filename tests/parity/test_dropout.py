"""Dropout: equal where activations are replicated, different where they are not, and never the same twice."""

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.parity.comparison import TOLERANCE
from tests.parity.test_plans import ALIKE, DROPOUT

FOUR_LAYERS = {**DROPOUT, "Model.num_layers": 4}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("granularity", ["full", "core_attn"])
def test_recomputation_drops_the_same(comparison, granularity):
    """In the pipeline, where other micro batches run between a forward pass and its recomputation."""
    recompute = {"Model.use_recompute": True, "Model.recompute_granularity": granularity}
    reference, _ = comparison.reference("gpt", "sgd", 4, extra=FOUR_LAYERS, steps=2)
    again, _ = comparison.reference("gpt", "sgd", 4, extra={**FOUR_LAYERS, **recompute}, steps=2)
    assert again["loss"] == pytest.approx(reference["loss"], rel=TOLERANCE)
    comparison.check(Plan(pp=2), extra={**FOUR_LAYERS, **recompute}, **ALIKE)


@pytest.mark.parametrize(
    ("plan", "trunk_is_replicated"),
    [
        (Plan(mp=2), True),
        (Plan(mp=2, sequence_parallel=True), False),
        (Plan(dp=2), False),
        (Plan(sharding=2), False),
        (Plan(sep=2), False),
    ],
    ids=str,
)
def test_streams_of_two_ranks(comparison, plan, trunk_is_replicated):
    first, second = comparison.pools.run(plan, "tests.parity.training:dropout_masks")
    for mine, theirs in zip(first, second, strict=True):
        assert (mine["trunk"] == theirs["trunk"]) == trunk_is_replicated
        assert mine["heads"] != theirs["heads"]
    both = [mask for rank in (first, second) for drawn in rank for mask in drawn.values()]
    num_replicated = len(first) if trunk_is_replicated else 0
    assert len(set(both)) == len(both) - num_replicated, "two streams drew the same"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("plan", "extra"),
    [
        (Plan(mp=2, sequence_parallel=True), {"Model.recompute_granularity": "full"}),
        (Plan(mp=2), {"Model.recompute_granularity": "full_attn"}),
        (Plan(sep=2), {"Model.recompute_granularity": "core_attn"}),
        (Plan(sharding=2, sharding_stage=3), {"Model.recompute_granularity": "full"}),
    ],
    ids=str,
)
def test_recomputation_restores_every_stream(comparison, plan, extra):
    """The same plan with and without recomputation draws the same masks, so it learns the same."""
    runs = [
        comparison.run_plan(plan, "gpt", "sgd", extra={**FOUR_LAYERS, **more}, steps=2)[0]
        for more in ({}, {"Model.use_recompute": True, **extra})
    ]
    assert runs[1]["grad_norm"] == pytest.approx(runs[0]["grad_norm"], rel=TOLERANCE)
    assert runs[1]["loss"] == pytest.approx(runs[0]["loss"], rel=TOLERANCE)
