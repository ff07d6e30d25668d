"""Processes meet, or report in time why not. Real ports, one thread per process."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ppfleetx.distributed import rendezvous
from ppfleetx.distributed.cpu.handshake import meet
from ppfleetx.distributed.cpu.wire import StartError
from ppfleetx.distributed.rendezvous import Member, Members, RendezvousError, receive, visit
from ppfleetx.utils.lost_peers import START_VARIABLE
from tests.helpers.ranks import free_port


@pytest.fixture
def point() -> tuple[str, int]:
    return "127.0.0.1", free_port()


class Meeting:
    """Members that meet at one address, each in a thread."""

    def __init__(self, point: tuple[str, int], seconds: float = 1.5) -> None:
        self.point, self.seconds = point, seconds
        self.results: dict[object, Members | RendezvousError] = {}
        self._threads: list[threading.Thread] = []

    def come(self, number: int | None, size: int, name: str = "", *, first: bool = False) -> None:
        member = Member(name or f"rank {number}", number, None if number is None else ("10.0.0.1", number))

        def run() -> None:
            act = receive if first or number == 0 else visit
            try:
                found = act(self.point, size, member, self.seconds)
                found.close()
            except RendezvousError as error:
                found = error
            self.results[name or number] = found

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def end(self, within: float = 10.0) -> dict[object, str]:
        """Wait up to so many seconds; return the errors."""
        deadline = time.monotonic() + within
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), self.results
        return {
            name: f"{error}; {error.fix}"
            for name, error in self.results.items()
            if isinstance(error, RendezvousError)
        }


def listens(point: tuple[str, int]) -> None:
    """Wait until the port is open."""
    deadline = time.monotonic() + 5.0
    with socket.socket() as probe:
        while probe.connect_ex(point) and time.monotonic() < deadline:
            time.sleep(0.02)


@pytest.fixture
def listener(point) -> Iterator[socket.socket]:
    """Another program at the meeting point."""
    with socket.create_server(point) as server:
        yield server


def test_all_members_know_the_same(point) -> None:
    meeting = Meeting(point)
    for number in (2, 1, 0):  # whoever comes first waits
        meeting.come(number, 3)
        time.sleep(0.05)
    assert meeting.end() == {}
    first = meeting.results[0]
    assert first.names == ["rank 0", "rank 1", "rank 2"]
    assert first.addresses == [("10.0.0.1", number) for number in range(3)]
    for number, members in meeting.results.items():
        assert (members.number, members.names) == (number, first.names)
        assert members.addresses == first.addresses


def test_who_does_not_come_is_named_to_all_who_came(point) -> None:
    meeting = Meeting(point)
    for number in (0, 2):
        meeting.come(number, 5)
    told = meeting.end()
    for number in (0, 2):
        assert f"ranks 1, 3, 4 did not connect to 127.0.0.1:{point[1]} within 1.5 s" in told[number]


def test_members_without_numbers_are_counted_as_they_come(point) -> None:
    meeting = Meeting(point)
    meeting.come(None, 3, "node a", first=True)
    meeting.come(None, 3, "node b")
    assert "1 of 2 others did not connect" in meeting.end()["node b"]
    meeting = Meeting(point)
    meeting.come(None, 2, "node a", first=True)
    meeting.come(None, 2, "node b")
    assert meeting.end() == {}
    assert meeting.results["node b"].names == ["node a", "node b (127.0.0.1)"]


def test_nobody_at_the_meeting_point_and_an_unknown_name(point) -> None:
    with pytest.raises(RendezvousError, match=rf"rank 0 at 127.0.0.1:{point[1]} .*nobody listens there"):
        visit(point, 2, Member("rank 1", 1), 0.3)
    with pytest.raises(RendezvousError, match=r"no\.such\.host\.invalid.*the name is not known here"):
        visit(("no.such.host.invalid", 8000), 2, Member("rank 1", 1), 0.3)


def test_a_member_that_ends_meanwhile_is_named_at_once(point) -> None:
    meeting = Meeting(point, 60.0)
    for number in (0, 1):
        meeting.come(number, 4)
    listens(point)
    greeting = {"name": "rank 2", "number": 2, "size": 4, "address": None}
    connection = socket.create_connection(point, 5)
    connection.sendall(json.dumps(greeting).encode() + b"\n")
    time.sleep(0.3)
    connection.close()
    told = meeting.end(within=8)
    assert all("rank 2 ended before all had connected" in told[number] for number in (0, 1))


def test_two_jobs_at_one_place_are_distinguished(point) -> None:
    meeting = Meeting(point, 3.0)
    meeting.come(0, 3)
    meeting.come(1, 3)
    time.sleep(0.5)
    meeting.come(1, 3, name="again")
    meeting.come(1, 2, name="other size")
    told = meeting.end()
    assert "number 1 is there already: two jobs meet at" in told["again"]
    assert "has 3 members, not 2" in told["other size"] and "--nnodes" in told["other size"]
    assert all(words in told[0] for words in ("rank 2 did not connect", "turned away: ", "again: number 1"))


def test_a_port_in_use(point, listener) -> None:
    with pytest.raises(RendezvousError, match=f"port {point[1]} of this machine cannot be opened") as error:
        receive(point, 2, Member("rank 0", 0), 1.0)
    assert "another free port" in error.value.fix


@pytest.mark.parametrize("speaks", [True, False])
def test_another_program_is_not_taken_for_the_first_process(point, listener, speaks, monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 0.5)
    meeting = Meeting(point)
    meeting.come(1, 2)
    with listener.accept()[0] as connection:
        if speaks:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
        told = meeting.end()[1]
    assert ("another program" if speaks else "nothing comes through it") in told


def test_strangers_delay_nobody(point) -> None:
    meeting = Meeting(point)
    meeting.come(0, 2)
    listens(point)
    with socket.create_connection(point), socket.create_connection(point) as speaks:
        speaks.sendall(b"GET / HTTP/1.1\r\n\r\n")
        meeting.come(1, 2)
        assert meeting.end() == {}


def test_cpu_ranks_end_with_a_start_error(point, monkeypatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("PADDLE_MASTER", f"127.0.0.1:{point[1]}")
    monkeypatch.setenv(START_VARIABLE, "1")
    with pytest.raises(StartError, match=r"^rank 0: rank 1 did not connect .*PPFLEETX_START_TIMEOUT"):
        meet(0, 2, ("127.0.0.1", 1))
