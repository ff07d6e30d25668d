"""Values, errors and work in turns across the ranks of a job."""

from types import SimpleNamespace

import pytest

from ppfleetx.config.errors import DataError
from ppfleetx.distributed import coordination
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import (
    any_rank,
    first_on_each_node,
    gather,
    joint_errors,
    joint_message,
)
from ppfleetx.distributed.cpu.wire import PeerLostError

CASES = "tests.distributed.job_cases:"


def test_values_of_all_ranks_by_rank(pools):
    values = [{"rank": 0, "text": "é"}, {"rank": 1, "text": "é" * 101}]
    assert pools(2).run(CASES + "gathered") == [[values, [[0, 2**40], [1, 2**40]]]] * 2


@pytest.mark.parametrize(
    ("failing", "name_ranks", "expected"),
    [
        ([], True, ["nothing"] * 3),
        ([1], True, ["JointError: rank 1: no such corpus"] * 3),
        ([0, 2], True, ["JointError: ranks 0, 2: no such corpus"] * 3),
        ([0, 1, 2], True, ["DataError: no such corpus"] * 3),
        ([0], False, ["DataError: no such corpus", *["JointError: no such corpus"] * 2]),
    ],
)
def test_a_mistake_of_one_rank_is_raised_by_all(pools, failing, name_ranks, expected):
    assert pools(3).run(CASES + "mistake", failing=failing, name_ranks=name_ranks) == expected


@pytest.mark.parametrize(
    ("texts", "name_ranks", "expected"),
    [
        (["no a", None, "no b", "no a"], True, "ranks 0, 3: no a; rank 2: no b"),
        (["no a", "no b"], False, "rank 0: no a; rank 1: no b"),
        (
            list("abcdefghij"),
            True,
            "; ".join(f"rank {i}: {'abcdefgh'[i]}" for i in range(8)) + "; also ranks 8, 9",
        ),
    ],
)
def test_messages_that_differ_are_all_told(texts, name_ranks, expected):
    assert joint_message(texts, name_ranks=name_ranks) == expected


def test_a_defect_of_one_rank_ends_all(pools):
    first, *others = pools(3).run(CASES + "mistake", failing=[1], name_ranks=False, with_defect=0)
    assert first == "TypeError: a defect"
    assert others == ["PeerEndedError: another rank has failed: rank 0: TypeError: a defect"] * 2


def test_a_defect_is_not_hidden_by_a_lost_rank(monkeypatch):
    def lose(*_):
        raise PeerLostError("rank 1 is gone")

    monkeypatch.setattr(coordination, "gather", lose)
    two = SimpleNamespace(world_size=2)
    for error, expected in ((TypeError("a defect"), TypeError), (DataError("no such corpus"), PeerLostError)):
        with pytest.raises(expected), joint_errors(two):
            raise error


FAILED = [["DataError: no such corpus", []], *[["JointError: no such corpus", []]] * 2]


@pytest.mark.parametrize(
    ("limit", "arguments", "expected"),
    [
        ({}, {"first_fails": False}, [["nothing", ["made by rank 0"]]] * 3),
        ({}, {"first_fails": True}, FAILED),
        # The first rank takes longer than the limit of messages.
        (
            {"PADDLE_CPU_COMM_TIMEOUT": "3"},
            {"first_fails": False, "seconds": 5.0},
            [["nothing", ["made by rank 0"]]] * 3,
        ),
    ],
    ids=str,
)
def test_the_first_rank_of_a_node_makes_what_the_others_find(pools, tmp_path, limit, arguments, expected):
    assert pools(3, **limit).run(CASES + "in_turns", directory=str(tmp_path), **arguments) == expected


def test_nobody_gives_up_while_another_rank_saves_for_longer_than_the_limit_of_messages(pools, tmp_path):
    pool = pools(2, PADDLE_CPU_COMM_TIMEOUT="3")
    results = pool.run(CASES + "saved_in_the_background", directory=str(tmp_path), seconds=2.0)
    assert results == [[True, None]] * 2


def test_alone_there_is_nobody_to_tell():
    alone = ParallelContext.single()
    assert gather(alone, {"any": object}) == [{"any": object}]
    assert any_rank(alone, "SIGTERM")
    assert not any_rank(alone, None)
    assert first_on_each_node(alone, lambda: 3) == 3
    with pytest.raises(DataError, match=r"^mine$"), joint_errors(alone):
        raise DataError("mine")
