"""Processes that have met exchange values."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ppfleetx.distributed.rendezvous import RendezvousError
from ppfleetx.doctor import process_connections
from ppfleetx.doctor.process_connections import connect_processes
from tests.helpers.ranks import free_port


def together(port: int, size: int, act, seconds: float = 10.0) -> list:
    """What ``act`` gives for each member, each in a thread."""

    def member(number: int):
        place = ("127.0.0.1", port), size, f"rank {number}", seconds
        meeting = connect_processes(*place, is_host=number == 0, number=number)
        try:
            return act(meeting)
        finally:
            meeting.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


def test_members_meet_and_exchange_values_in_the_same_order():
    def act(meeting):
        first = meeting.exchange({"mine": meeting.number}, 5.0)
        second = meeting.exchange("x" * 100_000 * meeting.number, 5.0)
        return [a.value["mine"] for a in first], [len(a.value) for a in second], meeting.names

    told = together(free_port(), 3, act)
    assert all(one[:2] == ([0, 1, 2], [0, 100_000, 200_000]) for one in told)
    assert told[2][2] == ["rank 0", "rank 1", "rank 2"]


def test_who_has_answered_waits_while_somebody_gets_further():
    """Longer than a step may take: the first goes on waiting, and so does everybody."""

    def act(meeting):
        if meeting.number == 0:
            time.sleep(0.6)  # others wait for the first
        if meeting.number == 1:
            for step in range(8):
                meeting.announce(f"check {step}")
                time.sleep(0.3)
        return [answer.value for answer in meeting.exchange(meeting.number, 0.8)]

    assert together(free_port(), 3, act) == [[0, 1, 2]] * 3


def test_a_first_that_is_gone_or_silent_is_named_by_the_others(monkeypatch):
    monkeypatch.setattr(process_connections, "_ROUNDS", 1)
    done = threading.Event()

    def act(meeting):
        if meeting.number == 0:
            meeting.announce("joining the process groups")
            done.wait(20.0)
            return None
        with pytest.raises(RendezvousError) as error:
            meeting.exchange("here", 0.5)
        done.set()
        return str(error.value)

    _, told = together(free_port(), 2, act)
    assert "is gone: no answer within 0.5 s" in told and told.endswith("at: joining the process groups")
