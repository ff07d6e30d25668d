"""The most memory of a card before the first step, in a step and in a save, beside what the planner says."""

import pytest

from tests.device.conftest import PLANS_IN_A_PROCESS
from tests.device.place import place
from tests.device.reference import environment
from tests.helpers.ranks import Pools
from tests.planner.machine import compare_device_memory
from tests.planner.plans import DEVICE_PLANS, O2, SHORT_DEVICE_PLANS, device_plan_name, world_size

pytestmark = pytest.mark.device

TOLERANCE = 0.05 if place().is_reference else 0.25
"""Of predictions; what cuBLAS takes to work in is not predicted."""


@pytest.fixture(scope="module")
def pools(here):
    """On the reference device the host waits for each operator. Else tensors that collectives use on streams
    of their own are given back the later, the further the host is ahead."""
    waits = {"FLAGS_benchmark": "1", **environment(poison=1)} if here.is_reference else here.environment
    pools = Pools(device=here.device, most_calls=PLANS_IN_A_PROCESS, **waits)
    yield pools
    pools.close()


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(one, id=f"short: {device_plan_name(*one)}") for one in SHORT_DEVICE_PLANS),
        *(pytest.param(one, id=device_plan_name(*one)) for one in DEVICE_PLANS),
    ],
)
def test_peaks_are_predicted(
    pools, need_cards, need_type, corpus, device, here, tmp_path, record_property, case
):
    """Of the fullest rank of each pipeline stage; and a start takes no more than a step."""
    _, plan, more = case
    need_cards(world_size(plan))
    if O2.items() <= more.items() and not here.is_reference:
        need_type("bfloat16")
    rows = compare_device_memory(
        pools, case, device, corpus, tmp_path / "run", is_reference=here.is_reference
    )
    record_property("errors", {row.what: round(row.error, 4) for row in rows})
    wrong = [row for row in rows if abs(row.error) > TOLERANCE]
    assert not wrong
    measured = {row.what: row.measured for row in rows}
    assert all(value <= measured[what.replace("start", "step")] for what, value in measured.items())
