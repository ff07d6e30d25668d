"""Device waits and kernel launches of a step do not increase (tests/operators/counts.json)."""

import warnings

import pytest

from tests.operators import counts

CURE = "python -m tests.operators counts"


def compare(row, found, committed):
    risen, fallen = counts.differences(row, found, committed)
    assert not risen, f"{'; '.join(risen)}; where that is meant: {CURE}"
    if fallen:
        warnings.warn(f"{row}: fewer than committed; keep it so: {CURE}", stacklevel=2)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("row", counts.STEPS)
def test_a_step_waits_no_more_than_before(pools, row):
    compare(row, counts.step(pools, row), counts.read()["steps"][row])


@pytest.mark.parametrize("row", counts.BLOCKS)
def test_a_block_launches_no_more_than_before(pools, row):
    committed = counts.read()["launches"]
    for part, found in counts.block(pools, row).items():
        compare(part, found, committed[part])


def test_each_way_to_wait_is_counted(pools):
    (found,) = pools(1).run(counts.CASES + "each_wait")
    copies = {"to_tensor": [0, 1], "set_value": [0, 1], "nothing": [0, 0]}
    assert found == {key: copies.get(key, [1, 0]) for key in found}


def test_a_count_that_rises_is_an_error_and_one_that_falls_is_told():
    committed = {"reads": 2, "copies": 1}
    with pytest.raises(AssertionError, match="dp 2: reads 3, were 2; where that is meant: python -m"):
        compare("dp 2", {"reads": 3, "copies": 0}, committed)
    with pytest.warns(UserWarning, match="dp 2: fewer than committed"):
        compare("dp 2", {"reads": 2, "copies": 0}, committed)
    with pytest.raises(AssertionError, match="all 9, were 8"):
        compare("gpt: a block", {"add": 3, "mul": 6, "all": 9}, {"add": 4, "mul": 4, "all": 8})
