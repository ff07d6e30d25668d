"""Links between machines, with real sockets: nothing arrives, only little, and too slowly."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ppfleetx.doctor import network
from ppfleetx.doctor.check import Status
from ppfleetx.doctor.meeting import Answer
from ppfleetx.doctor.network import link_rows, measure_link, receiving, speed_rows, try_link
from tests.helpers.ranks import free_port

NAMES = ["node a", "node b"]


@contextlib.contextmanager
def between(port: int, carry: Callable[[bytes], bytes]) -> Iterator[int]:
    """A port whose connections are carried on to ``port``, as far as ``carry`` lets their bytes pass."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, target: socket.socket, through: Callable[[bytes], bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(through(data))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = listener.accept()
                there = socket.create_connection(("127.0.0.1", port))
                for ends in ((here, there, carry), (there, here, bytes)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()


def test_a_link_that_works_has_a_speed():
    with receiving() as port:
        assert try_link(("127.0.0.1", port)) == {}
        found = measure_link(("127.0.0.1", port))
    assert found["speed"] > network._TOO_SLOW
    assert try_link(("127.0.0.1", free_port()))["problem"] == "Connection refused"


@pytest.mark.parametrize(
    ("most", "words", "fix"),
    [
        (0, "nothing that is sent arrives", "firewall"),
        (200, "64.0 KiB do not arrive", "mtu"),
    ],
)
def test_a_link_that_opens_and_carries_nothing_or_little_is_told_apart(monkeypatch, most, words, fix):
    left = most

    def carry(data: bytes) -> bytes:
        nonlocal left
        through, left = data[:left], max(0, left - len(data))
        return through

    monkeypatch.setattr(network, "_SEND_SECONDS", 1.5)
    with receiving() as port, between(port, carry) as entry:
        found = try_link(("127.0.0.1", entry))
    assert words in found["problem"] and fix in found["fix"].lower()
    rows = list(link_rows(NAMES, [Answer({"links": {"1": found}, "named": {}}), Answer(problem="it ended")]))
    assert [row.status for row in rows] == [Status.FAIL] * 2
    assert rows[0].found.startswith("node a does not reach node b: a connection opens, and ")
    assert rows[1].found == "node b has left: it ended"


def test_a_slow_link_is_measured_in_little_time():
    def slowly(data: bytes) -> bytes:
        time.sleep(len(data) / 1e6)
        return data

    begin = time.monotonic()
    with receiving() as port, between(port, slowly) as entry:
        found = measure_link(("127.0.0.1", entry))
    assert 1e5 < found["speed"] < 1.1e6 and time.monotonic() - begin < 10.0


@pytest.mark.parametrize(
    ("one", "other", "statuses"),
    [
        (1e9, 9e8, [Status.OK]),
        (1e9, 2e8, [Status.OK]),
        (1e9, 9e7, [Status.WARN]),
        (1e9, 9e6, [Status.FAIL]),
        (9e6, 8e6, [Status.WARN, Status.WARN]),
        (1e6, 1e6, [Status.FAIL, Status.FAIL]),
    ],
)
def test_slow_links_by_themselves_and_beside_others(one, other, statuses):
    speeds = {("node a", "node b"): one, ("node b", "node a"): other}
    rows = list(speed_rows(speeds))
    assert [row.status for row in rows] == statuses
    assert statuses == [Status.OK] or ("node b to node a" in rows[-1].found and "ethtool" in rows[-1].fix)


def test_an_interface_of_another_network_is_named():
    named = {"1 NCCL_SOCKET_IFNAME": "10.99.0.1: No route to host"}
    (row, links_row) = link_rows(
        NAMES, [Answer({"links": {}, "named": named}), Answer({"links": {}, "named": {}})]
    )
    assert row.name == "NCCL_SOCKET_IFNAME" and row.status is Status.FAIL and links_row.status is Status.OK
    assert "node a does not reach node b at the interface that it names: 10.99.0.1" in row.found
