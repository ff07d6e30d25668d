"""A rank that dies or runs other operations is named within seconds; a late one is waited for."""

import re

import pytest

from tests.helpers.ranks import Outcome

CASES = "tests.distributed.cpu.cases:"


def told(outcomes: list[Outcome]) -> list[tuple[float, str]]:
    """(seconds, message) of the ranks that survived."""
    alive = [outcome.value.split(" ", 1) for outcome in outcomes if not outcome.died]
    return [(float(seconds), message) for seconds, message in alive]


@pytest.mark.parametrize(
    ("size", "case", "arguments", "reason"),
    [
        (4, "die", {"rank": 1, "how": "kill"}, ""),
        (2, "die", {"rank": 1, "how": "goodbye"}, ": it has ended"),
        (3, "die_in_transfer", {"rank": 2, "after": 0.1}, ""),
        (3, "die_in_transfer", {"rank": 2, "after": 0.137}, ""),
    ],
)
def test_a_rank_that_is_gone_is_named_by_all_others(pools, size, case, arguments, reason):
    pool, rank = pools(size), arguments["rank"]
    outcomes = pool.call(CASES + case, timeout=30, **arguments)
    pool.usable = False
    messages = told(outcomes[:rank] + outcomes[rank + 1 :])
    assert len(messages) == size - 1
    for seconds, message in messages:
        assert message.startswith("PeerLostError")
        assert re.search(rf"rank {rank} at 127\.0\.0\.1:\d+ is gone{reason}", message)
        assert seconds < 5


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("collective", "all_reduce", "broadcast"),
        ("size", "all_reduce of group 0 (16 bytes)", "all_reduce (20 bytes)"),
    ],
)
def test_ranks_out_of_step_name_both_operations(pools, kind, one, other):
    pool = pools(2)
    outcomes = pool.call(CASES + "out_of_step", kind=kind, timeout=40)
    pool.usable = False
    messages = told(outcomes)
    stepped = [message for _, message in messages if message.startswith("OutOfStepError")]
    assert stepped, messages
    assert any(one in message and other in message for message in stepped), messages
    assert all(seconds < 20 for seconds, _ in messages)


def test_a_late_rank_is_waited_for(pools):
    messages = told(pools(2).call(CASES + "out_of_step", kind="late", timeout=40))
    assert [message for _, message in messages] == ["fine", "fine"]
    assert messages[1][0] >= 3  # this rank was late


def test_waits_are_bounded(pools):
    pool = pools(2, PADDLE_CPU_COMM_TIMEOUT="1")
    (seconds, message), _ = told(pool.call(CASES + "out_of_step", kind="late", timeout=40))
    pool.usable = False
    assert re.search(r"CommTimeoutError: rank 0: waited 1 s for rank 1 at [\d.:]+ in all_reduce", message)
    assert "PADDLE_CPU_COMM_TIMEOUT" in message
    assert seconds < 4
