"""A checkpoint belongs to the model: saved under one plan, a run continues under any other."""

import pytest

from ppfleetx.config.plan import ParallelPlan as Plan
from tests.parity.comparison import TOLERANCE

ONE_CARD = Plan()
CHAINS = [
    (Plan(pp=2, mp=2), Plan(sharding=2, sharding_stage=3), ONE_CARD),
    (ONE_CARD, Plan(pp=4, virtual_pp_degree=2), Plan(mp=2, sequence_parallel=True)),
    (Plan(sharding=2, sharding_stage=2, sharding_offload=True, mp=2), Plan(sep=2), Plan(pp=2, sharding=2)),
    (
        Plan(dp=2, pp=2, pp_layers=(3, 5)),
        Plan(sharding=4, sharding_stage=3, sharding_offload=True),
        Plan(dp=2),
    ),
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda plans: " -> ".join(map(str, plans)))
def test_plans_change_at_each_resumption(comparison, tmp_path, chain):
    expected = comparison.train_part(ONE_CARD, 0, 6)
    assert comparison.train_along(chain, tmp_path) == pytest.approx(expected, rel=TOLERANCE)
