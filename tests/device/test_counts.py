"""What a step asks of the device, as the device itself counts it, does not grow."""

import warnings

import pytest

from tests.device.reference import NAME, environment, obstacle
from tests.helpers.ranks import Pools
from tests.operators.counts import STEPS, differences

pytestmark = [pytest.mark.device, pytest.mark.skipif(bool(obstacle()), reason=obstacle())]
KINDS = ("launches", "waits", "blocking copies", "queued copies", "collectives")
# Of a step of eight layers, after two others; of two ranks, the larger.
COUNTS = {
    "one": (1959, 0, 0, 5, 0),
    "one, float16 O2": (3217, 0, 0, 5, 0),
    "dp 2": (989, 0, 0, 5, 3),
    "mp 2": (2244, 0, 0, 7, 152),
    "pp 2": (1035, 0, 0, 11, 12),
    "sharding 2, stage 2": (1093, 0, 0, 5, 7),
    "sharding 2, stage 3": (1269, 0, 0, 5, 85),
    "sep 2": (2411, 0, 0, 7, 131),
    "dp 2, float16 O2": (1671, 0, 0, 5, 4),
}


@pytest.fixture(scope="module")
def pools():
    with Pools(device=NAME, **environment()) as pools:
        yield pools


@pytest.mark.parametrize("row", STEPS)
def test_a_step_asks_for_no_more_than_before(pools, record_property, row):
    plan, extra = STEPS[row]
    size = 2 if plan else 1
    ranks = pools(size).run("tests.device.cases.counts:step", plan=plan, world_size=size, extra=extra)
    found = {kind: max(rank[kind] for rank in ranks) for kind in KINDS}
    record_property("counts", found)
    risen, has_fallen = differences(row, found, dict(zip(KINDS, COUNTS[row], strict=True)))
    assert not risen
    if has_fallen:
        warnings.warn(f"{row}: fewer than committed, {found}: commit them", stacklevel=1)
