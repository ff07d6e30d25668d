"""A user's own program with fleet's layers on the CPU process groups: each plan gives the serial losses."""

from __future__ import annotations

import pytest

TRAIN = "tests.distributed.cpu.fleet_program:train"


@pytest.mark.parametrize("degrees", [{"mp": 2}, {"sharding": 2}, {"dp": 2, "mp": 2}], ids=str)
def test_a_plan_equals_serial(pools, degrees) -> None:
    expected = pools(1).run(TRAIN)[0]
    assert expected[-1] < expected[0]
    size = 1
    for degree in degrees.values():
        size *= degree
    found = pools(size).run(TRAIN, **degrees)
    means = [sum(losses) / size for losses in zip(*found, strict=True)]
    assert means == pytest.approx(expected, rel=1e-6)
