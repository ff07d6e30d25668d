"""Processes that have met exchange values."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ppfleetx.distributed.rendezvous import RendezvousError
from ppfleetx.doctor import meeting as meeting_module
from ppfleetx.doctor.meeting import open_meeting
from tests.helpers.ranks import free_port


def together(port: int, size: int, act, seconds: float = 10.0) -> list:
    """What ``act`` gives for each member, each in a thread."""

    def member(number: int):
        place = ("127.0.0.1", port), size, f"rank {number}", seconds
        meeting = open_meeting(*place, is_host=number == 0, number=number)
        try:
            return act(meeting)
        finally:
            meeting.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


def short_pulse(monkeypatch) -> None:
    monkeypatch.setattr(meeting_module, "PULSE_SECONDS", 0.1)


def test_members_meet_and_exchange_values_in_the_same_order():
    def act(meeting):
        first = meeting.exchange({"mine": meeting.number}, 5.0)
        second = meeting.exchange("x" * 100_000 * meeting.number, 5.0)
        return [a.value["mine"] for a in first], [len(a.value) for a in second], meeting.names

    told = together(free_port(), 3, act)
    assert all(one[:2] == ([0, 1, 2], [0, 100_000, 200_000]) for one in told)
    assert told[2][2] == ["rank 0", "rank 1", "rank 2"]


def test_a_member_that_does_not_answer_or_ends_is_named_with_its_place():
    done = threading.Event()

    def act(meeting):
        if meeting.number == 1:
            meeting.tell("all_reduce of the mp group")
            done.wait(5.0)
            return None
        if meeting.number == 2:
            meeting.tell("losses")
            return None
        answers = meeting.exchange("here", 1.0)
        done.set()
        again = meeting.exchange("here", 1.0)
        return [a.problem for a in answers], [a.problem for a in again]

    answers, again = together(free_port(), 3, act)[0]
    assert answers[0] == "" and answers == again
    assert answers[1] == "no answer within 1 s; it was last heard of at: all_reduce of the mp group"
    assert answers[2].startswith("it ended at: losses")


def test_a_member_that_is_stopped_is_told_from_one_that_is_slow(monkeypatch):
    short_pulse(monkeypatch)
    done = threading.Event()

    def act(meeting):
        if meeting.number == 1:
            meeting.tell("losses")
            meeting._pulse.stop()  # as SIGSTOP does
            done.wait(20.0)
            return None
        if meeting.number == 2:
            time.sleep(3.0)
            return [a.problem for a in meeting.exchange("slow", 20.0, 1.5)]
        problems = [a.problem for a in meeting.exchange("here", 20.0, 1.5)]
        done.set()
        return problems

    begun = time.monotonic()
    first, _, slow = together(free_port(), 3, act)
    assert first == slow and first[0] == first[2] == "" and time.monotonic() - begun < 15.0
    assert first[1] == (
        "nothing was heard of it for 1.5 s: its process is stopped, or its machine does not answer; it was "
        "last heard of at: losses"
    )


def test_a_first_that_is_stopped_is_named_by_the_others(monkeypatch):
    short_pulse(monkeypatch)
    monkeypatch.setattr(meeting_module, "MARGIN_SECONDS", 0.5)
    done = threading.Event()

    def act(meeting):
        if meeting.number == 0:
            meeting.tell("joining the process groups")
            meeting._pulse.stop()
            done.wait(20.0)
            return None
        with pytest.raises(RendezvousError) as error:
            meeting.exchange("here", 20.0, 0.5)
        done.set()
        return str(error.value)

    _, told = together(free_port(), 2, act)
    assert "is gone: nothing was heard of it for 1 s: its process is stopped" in told
    assert told.endswith("last heard of at: joining the process groups")


def test_who_has_answered_waits_while_somebody_gets_further(monkeypatch):
    """Longer than a step may take: the first goes on waiting, and so does everybody."""
    short_pulse(monkeypatch)
    monkeypatch.setattr(meeting_module, "MARGIN_SECONDS", 0.2)

    def act(meeting):
        if meeting.number == 0:
            time.sleep(0.6)  # others wait for the first
        if meeting.number == 1:
            for step in range(8):
                meeting.tell(f"check {step}")
                time.sleep(0.3)
        return [answer.value for answer in meeting.exchange(meeting.number, 0.8)]

    assert together(free_port(), 3, act) == [[0, 1, 2]] * 3
