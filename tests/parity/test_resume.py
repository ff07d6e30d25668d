"""A checkpoint belongs to the model: saved under one plan, a run continues under any other."""

import pytest

from ppfleetx.config.plan import ParallelPlan as Plan
from tests.parity.comparison import TOLERANCE, fields_of, micro_batch_size_of

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


def part(comparison, plan, first, end, load_from=None, save_to=None) -> list[float]:
    results = comparison.pools(plan.world_size).run(
        "tests.parity.training:train_part",
        plan=fields_of(plan),
        world_size=plan.world_size,
        model="gpt",
        micro_batch_size=micro_batch_size_of(plan),
        first_step=first,
        end_step=end,
        load_from=load_from,
        save_to=save_to,
    )
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda plans: " -> ".join(map(str, plans)))
def test_plans_change_at_each_resumption(comparison, tmp_path, chain):
    expected = part(comparison, ONE_CARD, 0, 6)
    numbers, checkpoint = [], None
    for index, plan in enumerate(chain):
        first, end = 2 * index, 2 * index + 2
        numbers += part(comparison, plan, first, end, load_from=checkpoint, save_to=str(tmp_path))
        checkpoint = str(tmp_path / f"epoch_0_step_{end}")
    assert numbers == pytest.approx(expected, rel=TOLERANCE)
