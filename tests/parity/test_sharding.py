"""Each stage of sharding divides what it says it divides."""

import pytest

from ppfleetx.config.plan import ParallelPlan as Plan
from tests.parity.comparison import fields_of


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
    first, second = comparison.pools(2).run(
        "tests.parity.training:held_after_step", plan=fields_of(plan), world_size=2
    )
    for what in ("values", "gradients", "states"):
        if what in divided:
            assert first[what] + second[what] == pytest.approx(1.0), "each element has one owner"
            assert first[what] == pytest.approx(0.5, abs=0.02)
        else:
            assert first[what] == second[what] == 1.0


@pytest.mark.parametrize("stage", [2, 3])
def test_offload_updates_copies_of_what_is_owned(comparison, stage):
    """The optimizer is handed other memory than the parameters' and gradients', for each parameter of the
    rank, and its states move only once they may (a save in the background reads them until then)."""
    plan = Plan(sharding=2, sharding_stage=stage, sharding_offload=True)
    ranks = comparison.pools(2).run(
        "tests.parity.training:offloaded_updates", plan=fields_of(plan), world_size=2
    )
    for rank in ranks:
        assert rank["updated"] == rank["owned"] and rank["owned"]
        assert rank["shared"] == []
        assert rank["changes"] == ["in the update", "in the update"]
