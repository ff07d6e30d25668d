"""The ranks of a job meet, or each of them says within a known time why not."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.distributed.cpu.wire import StartError
from ppfleetx.distributed.rendezvous import Members, meet, meeting_point
from ppfleetx.utils.start import START_VARIABLE
from tests.helpers.ranks import free_port


@pytest.fixture
def point(monkeypatch) -> tuple[str, int]:
    """Where the ranks of the test meet."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    port = free_port()
    monkeypatch.setenv("PADDLE_MASTER", f"127.0.0.1:{port}")
    monkeypatch.setenv(START_VARIABLE, "1.5")
    return "127.0.0.1", port


class Meeting:
    """Ranks that come to meet, each in a thread."""

    def __init__(self) -> None:
        self.results: dict[object, Members | StartError] = {}
        self._threads: list[threading.Thread] = []

    def come(self, rank: int, world_size: int, name: object = None) -> None:
        def run() -> None:
            try:
                found = meet(rank, world_size, ("127.0.0.1", 1000 + rank))
            except StartError as error:
                found = error
            self.results[rank if name is None else name] = found

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def end(self, within: float) -> dict[object, str]:
        """What each rank was told instead of meeting, all within so many seconds."""
        deadline = time.monotonic() + within
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), self.results
        return {rank: str(found) for rank, found in self.results.items() if isinstance(found, StartError)}


@pytest.fixture
def listener(point) -> Iterator[socket.socket]:
    """Another program at the meeting point."""
    with socket.create_server(point) as server:
        yield server


def greet(point: tuple[str, int], **greeting: object) -> socket.socket:
    connection = socket.create_connection(point, 5)
    connection.sendall(json.dumps(greeting).encode() + b"\n")
    return connection


def test_all_ranks_know_the_same(point) -> None:
    meeting = Meeting()
    for rank in (2, 1, 0):  # whoever comes first waits
        meeting.come(rank, 3)
        time.sleep(0.05)
    assert meeting.end(within=5) == {}
    first = meeting.results[0]
    assert first.addresses == (("127.0.0.1", 1000), ("127.0.0.1", 1001), ("127.0.0.1", 1002))
    assert len(first.token) == 32
    assert all(members == first for members in meeting.results.values())


def test_who_does_not_come_is_named_by_all_who_came(point) -> None:
    meeting = Meeting()
    for rank in (0, 2):
        meeting.come(rank, 5)
    told = meeting.end(within=8)
    for rank in (0, 2):
        assert f"waited 1.5 s for ranks 1, 3, 4 to come to 127.0.0.1:{point[1]}" in told[rank]
        assert START_VARIABLE in told[rank]


def test_nobody_at_the_meeting_point_is_said(point) -> None:
    meeting = Meeting()
    meeting.come(1, 2)
    told = meeting.end(within=8)[1]
    assert f"rank 1: no connection to rank 0 at 127.0.0.1:{point[1]} within 1.5 s" in told
    assert "Connection refused" in told


def test_a_rank_that_ends_meanwhile_is_named_at_once(point, monkeypatch) -> None:
    monkeypatch.setenv(START_VARIABLE, "60")
    meeting = Meeting()
    for rank in (0, 1):
        meeting.come(rank, 4)
    time.sleep(0.2)
    connection = greet(point, rank=2, world_size=4, address=["127.0.0.1", 4711])
    time.sleep(0.2)
    connection.close()
    told = meeting.end(within=5)
    assert all("rank 2 at 127.0.0.1:4711 ended before all ranks were there" in told[rank] for rank in (0, 1))


def test_two_jobs_at_one_place_are_told_apart(point) -> None:
    meeting = Meeting()
    meeting.come(0, 3)
    meeting.come(1, 3)
    time.sleep(0.3)
    meeting.come(1, 3, name="again")
    meeting.come(1, 2, name="other size")
    told = meeting.end(within=8)
    assert "rank 1 is there already: two jobs meet at" in told["again"]
    assert "has 3 ranks, not 2" in told["other size"]
    assert "for rank 2" in told[0]


def test_a_port_in_use_is_said_by_rank_0(point, listener) -> None:
    meeting = Meeting()
    meeting.come(0, 2)
    told = meeting.end(within=1)[0]
    assert f"rank 0 cannot listen at 127.0.0.1:{point[1]}" in told
    assert "another program holds the port" in told


@pytest.mark.parametrize("speaks", [True, False])
def test_another_program_is_not_taken_for_rank_0(point, listener, speaks) -> None:
    meeting = Meeting()
    meeting.come(1, 2)
    with listener.accept()[0] as connection:
        if speaks:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
        told = meeting.end(within=9)[1]  # the time to wait, and to connect
    assert ("another program holds the port" if speaks else "no answer within 1.5 s") in told


def test_no_meeting_point_is_a_mistake(monkeypatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("PADDLE_MASTER", "somewhere")
    with pytest.raises(ConfigError, match="PADDLE_MASTER = 'somewhere'"):
        meeting_point()
