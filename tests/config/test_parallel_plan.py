"""The table of legal plans, enumeration, rank groups and batch arithmetic."""

from dataclasses import replace

import pytest

from ppfleetx.config.batch_sizes import BatchPlan, resolve_batch
from ppfleetx.config.parallel_plan import (
    ParallelPlan,
    Workload,
    enumerate_plans,
    nearest_plan,
    violations,
)

WORK = Workload(12, 8, 4, 256, 1024, 64, 8)


def test_enumeration_is_legal_complete_and_without_repeats():
    for world in (1, 2, 6, 8, 12):
        plans = enumerate_plans(world)
        assert len(set(plans)) == len(plans)
        assert all(plan.world_size == world and not violations(plan) for plan in plans)
    assert enumerate_plans(1) == [ParallelPlan()]
    # dp, mp with and without SP, pp with and without virtual stages, three stages of sharding, two of them
    # with offload, sep
    assert len(enumerate_plans(2)) == 1 + 2 + 2 + 3 + 2 + 1


@pytest.mark.parametrize("world", [2, 4, 8])
def test_offload_is_enumerated_without_doubling_the_plans(world):
    plans = enumerate_plans(world)
    offloading = [plan for plan in plans if plan.sharding_offload]
    assert {plan.sharding_stage for plan in offloading} == {2, 3}
    assert len(offloading) <= len(plans) / 4
    if world == 8:
        assert any(plan.mp > 1 and plan.pp > 1 for plan in offloading)


@pytest.mark.parametrize(
    ("plan", "legal"),
    [
        (ParallelPlan(dp=2, mp=2, pp=2, sharding=2), True),  # stage 1 goes with everything
        (ParallelPlan(dp=2, sharding=2, sharding_stage=2), True),
        (ParallelPlan(dp=2, sharding=2, sharding_stage=3, sharding_offload=True), True),
        (ParallelPlan(mp=2, sharding=2, sharding_stage=2), True),
        (ParallelPlan(pp=2, sharding=2, sharding_stage=3), True),
        (ParallelPlan(pp=2, mp=2, sep=2, sequence_parallel=True), True),
        (ParallelPlan(pp=2, sharding_stage=3), True),  # a stage without ranks says nothing
        (ParallelPlan(pp=2, virtual_pp_degree=2), True),
        (ParallelPlan(pp=3, virtual_pp_degree=2), True),
        (ParallelPlan(mp=2, sequence_parallel=True), True),
        (ParallelPlan(pp=3, pp_schedule="zb_h1"), True),
        (ParallelPlan(pp=2, virtual_pp_degree=2, pp_schedule="zb_h1"), False),
        (ParallelPlan(pp=2, pp_layers=(5, 7)), True),
        (ParallelPlan(pp=2, pp_layers=(5, 6, 1)), False),
    ],
)
def test_legality(plan, legal):
    assert (not violations(plan)) == legal


def test_workload_rules():
    """Of experts and the vocabulary; the other rules are met in test_impossible_plans.py."""

    def first(plan: ParallelPlan, **work) -> str:
        found = violations(plan, replace(WORK, **work))
        return found[0].rule if found else ""

    assert "padded vocabulary 1023" in first(ParallelPlan(mp=2), padded_vocab=1023)
    assert first(ParallelPlan(pp=5, pp_layers=(3, 3, 2, 2, 2))) == ""
    assert first(ParallelPlan(pp=4, virtual_pp_degree=3)) == first(ParallelPlan(mp=4)) == ""
    of_experts = {"num_experts": 6, "expert_size": 64}
    assert "has none" in first(ParallelPlan(dp=2, ep=2), num_experts=0)
    assert "has none" in first(ParallelPlan(mp=2, expert_mp=1), num_experts=0)
    assert "6 experts" in first(ParallelPlan(dp=4, ep=4), **of_experts)
    assert "width of an expert 63" in first(ParallelPlan(dp=2, expert_mp=2), num_experts=6, expert_size=63)
    assert "the 2 ranks" in first(ParallelPlan(mp=2, pp=2, ep=2), **of_experts)
    assert first(ParallelPlan(mp=2, pp=2, ep=2, expert_mp=1), **of_experts) == ""
    assert first(ParallelPlan(dp=3, mp=2, ep=3), **of_experts) == ""


def test_nearest_plan_offloads_only_where_the_plan_did():
    given = ParallelPlan(mp=2, sharding=2, sharding_stage=2)
    for offload in (False, True):
        near = nearest_plan(replace(given, sharding_offload=offload), 8, WORK)
        expected = ParallelPlan(dp=2, mp=2, sharding=2, sharding_stage=2, sharding_offload=offload)
        assert near == expected
    first_stage = ParallelPlan(dp=4, sharding=2, sharding_offload=True)
    assert nearest_plan(first_stage, 8, WORK) == replace(first_stage, sharding_stage=2)
    assert nearest_plan(ParallelPlan(dp=8, sharding_offload=True), 8, WORK) == ParallelPlan(dp=8)


def test_groups_follow_the_order_of_axes():
    plan = ParallelPlan(dp=2, mp=2, pp=2, sharding=2)
    assert plan.coordinates(11) == {"dp": 1, "pp": 0, "sharding": 1, "sep": 0, "mp": 1}
    assert plan.groups("mp")[:2] == [[0, 1], [2, 3]]
    assert plan.groups("sharding")[:2] == [[0, 2], [1, 3]]
    assert plan.groups("pp")[0] == [0, 4]
    assert plan.groups("dp")[0] == [0, 8]
    for axis in ("dp", "pp", "sharding", "sep", "mp"):
        assert sorted(rank for group in plan.groups(axis) for rank in group) == list(range(16))


def test_layers_of_chunks():
    assert ParallelPlan(pp=2).layers_of_chunks(12) == (6, 6)
    assert ParallelPlan(pp=3, virtual_pp_degree=2).layers_of_chunks(12) == (2,) * 6
    assert ParallelPlan(pp=2, pp_layers=(5, 7)).layers_of_chunks(12) == (5, 7)


@pytest.mark.parametrize(
    ("given", "data_size", "resolved"),
    [
        ((64, 8, 4, None), 8, (64, 8, 4, 2)),
        ((64, None, 4, None), 8, (64, 8, 4, 2)),
        ((None, 8, 4, None), 8, (64, 8, 4, 2)),
        ((64, 8, None, None), 8, (64, 8, 8, 1)),
        ((64, 8, None, 2), 8, (64, 8, 4, 2)),
        ((64, None, None, 2), 8, (64, 8, 4, 2)),
        ((None, None, 4, 2), 8, (64, 8, 4, 2)),
        ((None, 8, None, None), 1, (8, 8, 8, 1)),
        ((480, None, 4, None), 8, (480, 60, 4, 15)),
        ((1536, 1536, 1, None), 1, (1536, 1536, 1, 1536)),
    ],
)
def test_batch_arithmetic(given, data_size, resolved):
    assert resolve_batch(*given, data_size=data_size) == BatchPlan(*resolved)
