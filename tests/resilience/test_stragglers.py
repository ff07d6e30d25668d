"""Slow ranks are identified by the time that they do not spend waiting."""

import numpy as np

from ppfleetx.resilience.stragglers import find_stragglers

HOSTS = ["a", "a", "b", "b"]


def test_the_rank_that_does_not_wait_is_the_slow_one():
    times = np.array([[1.0, 0.1, 0.3], [1.0, 0.1, 0.3], [1.0, 0.4, 0.0], [1.0, 0.1, 0.3]])
    found = find_stragglers(times, [0] * 4, HOSTS, 200, 100)
    assert [(slow.rank, slow.host) for slow in found.slowest] == [(2, "b")]
    assert abs(found.cost - 0.3) < 1e-9
    assert str(found) == (
        "slow ranks cost 30% of the last 100 steps: rank 2 on b (data 0.400 s, computing 0.600 s a step; "
        "usually 0.700 s in total)"
    )


def test_little_differences_and_the_work_of_other_stages_are_not_reported():
    even = np.array([[1.0, 0.1, 0.30], [1.0, 0.1, 0.31], [1.0, 0.1, 0.27], [1.0, 0.1, 0.32]])
    assert find_stragglers(even, [0] * 4, HOSTS, 200, 100) is None
    uneven = np.array([[1.0, 0.0, 0.5], [1.0, 0.0, 0.5], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    assert find_stragglers(uneven, [0, 0, 1, 1], HOSTS, 200, 100) is None
    assert [slow.rank for slow in find_stragglers(uneven, [0] * 4, HOSTS, 200, 100).slowest] == [2, 3]


def test_a_rank_that_is_alone_in_its_stage_is_compared_with_other_stages():
    more_work = np.array([[1.0, 0.1, 0.3], [1.0, 0.1, 0.0]])
    assert find_stragglers(more_work, [0, 1], HOSTS[1:3], 200, 100) is None
    slow = np.array([[1.0, 0.1, 0.6], [1.0, 0.1, 0.0]])
    assert str(find_stragglers(slow, [0, 1], HOSTS[1:3], 200, 100)) == (
        "slow ranks cost 60% of the last 100 steps: rank 1 on b (data 0.100 s, computing 0.900 s a step; "
        "other pipeline stages take 0.400 s in total, and may have less work)"
    )
