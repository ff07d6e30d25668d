"""Plans that divide experts, and pairs of plans under which a run begins and goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from ppfleetx.config.parallel_plan import Workload, enumerate_plans, violations
from tests.parity.comparison import Comparison, apart

ZERO_BUBBLE = [
    Plan(dp=2, pp=2, ep=2, pp_schedule="zb_h1"),
    Plan(sharding=2, sharding_stage=2, pp=2, ep=2, pp_schedule="zb_h1"),
    Plan(sharding=2, sharding_stage=3, pp=2, ep=2, pp_schedule="zb_h1"),
    Plan(sep=2, pp=2, ep=2, pp_schedule="zb_h1"),
    Plan(mp=2, pp=2, ep=2, expert_mp=1, sequence_parallel=True, pp_schedule="zb_h1"),
    Plan(dp=2, mp=2, pp=2, ep=2, sequence_parallel=True, pp_schedule="zb_h1"),
    Plan(dp=4, pp=2, ep=4, pp_schedule="zb_h1"),
]  # fmt: skip


def plans(size: int, work: Workload) -> list[Plan]:
    """Plans of ``size`` ranks that divide experts, or slice them otherwise than attention: all of up to four
    ranks, a choice of those of more."""
    found = [
        replace(plan, ep=ep, expert_mp=expert_mp)
        for plan in enumerate_plans(size, work)
        for ep in (1, 2, 4)
        for expert_mp in ((None, 1) if plan.mp > 1 else (None,))
    ]
    found = [plan for plan in found if (plan.ep > 1 or plan.expert_mp) and not violations(plan, work)]
    return [*found[:: 1 if size <= 4 else 8], *(plan for plan in ZERO_BUBBLE if plan.world_size == size)]


ONE_CARD = Plan()
RESUMED = [
    (ONE_CARD, Plan(dp=2, ep=2)),
    (Plan(dp=2, ep=2), ONE_CARD),
    (Plan(dp=4, ep=4), Plan(dp=4, ep=2)),
    (Plan(dp=4, ep=2), Plan(mp=2)),
    (Plan(mp=2), Plan(mp=2, ep=2, expert_mp=1, sequence_parallel=True)),
    (Plan(mp=2, dp=2, ep=2), Plan(pp=2, dp=2, ep=2)),
    (Plan(pp=2, dp=2, ep=2), Plan(sharding=4, sharding_stage=3, ep=2)),
    (Plan(sharding=4, sharding_stage=3, ep=2), Plan(sharding=2, sharding_stage=2, ep=2)),
    (Plan(sharding=2, sharding_stage=2, sharding_offload=True, ep=2), Plan(sep=2, ep=2)),
    (Plan(sep=2, dp=2, ep=4), Plan(pp=2, virtual_pp_degree=2, dp=2)),
    (Plan(pp=2, virtual_pp_degree=2, dp=2, ep=2), Plan(pp=4, ep=1)),
    (Plan(dp=2, pp=2, ep=2, pp_schedule="zb_h1"), Plan(dp=2, mp=2, ep=4, expert_mp=1)),
]


def resumed(comparison: Comparison, pair: tuple[Plan, Plan], directory: Path) -> float:
    """The largest relative difference from one card of loss and gradient norm, in two steps under the first
    plan and two under the second, which goes on from its checkpoint."""
    expected = comparison.train_part(ONE_CARD, 0, 4, model="moe_bias")
    found = comparison.train_along(pair, directory, model="moe_bias")
    return apart(found, expected)
