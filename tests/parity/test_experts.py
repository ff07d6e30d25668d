"""Mixtures of experts under plans that divide them; ``make parity`` runs more."""

import pytest

from ppfleetx.config.plan import ParallelPlan as Plan
from tests.parity.comparison import TOLERANCE
from tests.parity.experts import RESUMED, resumed

FULL = {"Model.use_recompute": True, "Model.recompute_granularity": "full"}


CASES = [
    (Plan(dp=2, ep=2), {}),
    (Plan(dp=2, ep=2), FULL),
    (Plan(mp=2), {}),
    (Plan(mp=2, ep=2, expert_mp=1, sequence_parallel=True), FULL),
    (Plan(sep=2, ep=2), {"Model.loss_chunks": 2}),
    (Plan(sharding=2, sharding_stage=3, ep=2), FULL),
    (Plan(dp=2, mp=2, ep=2), {}),
    (Plan(sharding=4, sharding_stage=2, ep=2), {"Distributed.sharding.reduce_overlap": False}),
    (Plan(dp=2, pp=2, ep=2), {"Distributed.overlap_p2p_comm": True}),
    (Plan(dp=2, pp=2, ep=2, virtual_pp_degree=2), {}),
    (Plan(dp=2, pp=2, ep=2, pp_schedule="zb_h1"), {}),
]


@pytest.mark.parametrize(
    ("plan", "extra", "model"),
    [(*case, ("moe", "moe_bias")[number % 2]) for number, case in enumerate(CASES)],
    ids=str,
)
def test_loss_metrics_and_weights(comparison, model, plan, extra):
    found = comparison.run(plan, model, "sgd", of_plan=extra)
    assert found.first == 0
    assert found.worst <= TOLERANCE, found


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize(
    "plan",
    [Plan(sep=2, ep=2), Plan(mp=2), Plan(mp=2, sep=2, ep=4, sequence_parallel=True, expert_mp=1)],
    ids=str,
)
def test_what_is_dropped_does_not_depend_on_the_plan(comparison, plan, policy):
    moe = f"{{num_experts: 4, expert_ffn_size: 32, capacity: {{factor: 0.9, policy: {policy}}}}}"
    extra = {"Model.moe": moe}
    found = comparison.run(plan, "moe", "sgd", extra=extra)
    assert found.worst <= TOLERANCE, found


@pytest.mark.parametrize("pair", RESUMED[4:7], ids=lambda pair: " -> ".join(map(str, pair)))
def test_a_run_goes_on_under_another_plan(comparison, tmp_path, pair):
    assert resumed(comparison, pair, tmp_path) <= TOLERANCE
