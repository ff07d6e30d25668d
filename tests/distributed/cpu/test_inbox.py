"""How far ahead of the owner of a sum a rank sends."""

from ppfleetx.distributed.cpu.inbox import AHEAD_BYTES, AHEAD_MESSAGES, MOST_MESSAGES, Window
from ppfleetx.distributed.cpu.wire import Signature


def admitted(sizes: list[int], owners: list[int] | None = None) -> list[list[int]]:
    """Numbers of the sums whose end each message waits for."""
    window = Window()
    pairs = zip(owners or [0] * len(sizes), sizes, strict=True)
    return [
        [first for first, _ in window.admit(owner, number, Signature(5, 0, nbytes, owner))]
        for number, (owner, nbytes) in enumerate(pairs)
    ]


def test_small_messages_are_ahead_up_to_their_bytes() -> None:
    quarter = AHEAD_BYTES // 4
    assert admitted([quarter] * 6) == [[], [], [], [], [0], [1]]


def test_large_messages_are_ahead_by_their_number() -> None:
    assert AHEAD_MESSAGES == 2
    assert admitted([2 * AHEAD_BYTES] * 4) == [[], [], [0], [1]]


def test_a_large_message_waits_for_several_small_ones() -> None:
    quarter = AHEAD_BYTES // 4
    assert admitted([quarter] * 4 + [AHEAD_BYTES, quarter]) == [[], [], [], [], [0, 1, 2], [3]]


def test_each_owner_has_its_own() -> None:
    assert admitted([AHEAD_BYTES] * 6, owners=[0, 1] * 3) == [[], [], [], [], [0], [1]]


def test_the_smallest_messages_are_ahead_by_their_number_too() -> None:
    waited = admitted([4] * (MOST_MESSAGES + 2))
    assert [first for first in waited if first] == [[0], [1]], "what is remembered is bounded"
