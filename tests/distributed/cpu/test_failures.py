"""A rank that dies or runs other operations is named within seconds; a late one is waited for."""

import re

import pytest

from tests.helpers.ranks import Outcome

CASES = "tests.distributed.cpu.cases:"


def told(outcomes: list[Outcome]) -> list[tuple[float, str]]:
    """(seconds, message) of the ranks that survived."""
    alive = [outcome.value.split(" ", 1) for outcome in outcomes if not outcome.died]
    return [(float(seconds), message) for seconds, message in alive]


def test_a_killed_rank_is_named_by_all_others(pools):
    pool = pools(4)
    messages = told(pool.call(CASES + "die", rank=1, how="kill", timeout=20))
    assert len(messages) == 3
    for seconds, message in messages:
        assert message.startswith("PeerLostError")
        assert re.search(r"rank 1 at 127\.0\.0\.1:\d+ is gone", message)
        assert seconds < 5


def test_a_rank_killed_in_a_transfer_is_named(pools):
    for after in (0.1, 0.137):
        pool = pools(3)
        messages = told(pool.call(CASES + "die_in_transfer", rank=2, after=after, timeout=30))
        assert len(messages) == 2
        for seconds, message in messages:
            assert message.startswith("PeerLostError")
            assert re.search(r"rank 2 at [\d.:]+ is gone", message)
            assert seconds < 5


def test_a_rank_that_ends_early_is_named(pools):
    pool = pools(2)
    outcomes = pool.call(CASES + "die", rank=1, how="goodbye", timeout=20)
    pool.usable = False
    seconds, message = outcomes[0].value.split(" ", 1)
    assert re.search(r"rank 1 at [\d.:]+ is gone: it has ended", message)
    assert float(seconds) < 5


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
