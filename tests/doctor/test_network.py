"""Links between machines, with real sockets: nothing arrives, or only little."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ppfleetx.doctor import network
from ppfleetx.doctor.check import Status, Target
from ppfleetx.doctor.meeting import Answer
from ppfleetx.doctor.network import (
    Interface,
    interfaces,
    link_rows,
    named_rows,
    receiving,
    try_link,
)
from tests.doctor.conftest import by_name
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


def test_a_link_that_works_has_no_problem():
    with receiving() as port:
        assert try_link(("127.0.0.1", port)) == {}
    assert try_link(("127.0.0.1", free_port()))["problem"] == "Connection refused"


@pytest.mark.parametrize(
    ("most", "words", "fix"),
    [
        (0, "nothing that is sent arrives", "firewall"),
        (200, "64.0 KiB do not arrive", "mtu"),
    ],
)
def test_a_link_that_opens_and_carries_nothing_or_little_is_reported(monkeypatch, most, words, fix):
    left = most

    def carry(data: bytes) -> bytes:
        nonlocal left
        through, left = data[:left], max(0, left - len(data))
        return through

    monkeypatch.setattr(network, "_SEND_SECONDS", 1.5)
    with receiving() as port, between(port, carry) as entry:
        found = try_link(("127.0.0.1", entry))
    assert words in found["problem"] and fix in found["fix"].lower()
    rows = list(link_rows(NAMES, [Answer({"1": found}), Answer(problem="it ended")]))
    assert [row.status for row in rows] == [Status.FAIL] * 2
    assert rows[0].found.startswith("node a does not reach node b: a connection opens, and ")
    assert rows[1].found == "node b has left: it ended"


# -- nodes -----------------------------------------------------------------------------------------


def test_nodes_that_meet_reach_each_other(monkeypatch):
    monkeypatch.setattr(network, "own_address", lambda environ: "127.0.0.1")
    monkeypatch.setattr(network, "address_row", lambda *a, **k: None)
    listens = threading.local()
    monkeypatch.setattr(network, "is_local", lambda address: listens.first)
    master = f"127.0.0.1:{free_port()}"

    def node(first: bool):
        listens.first = first
        return by_name(network.examine_nodes(master, 2, 10.0, {}))

    with ThreadPoolExecutor(2) as pool:
        for rows in pool.map(node, (True, False)):
            assert {rows[name].status for name in ("own address", "--master", "links")} == {Status.OK}


def test_a_name_nobody_knows_and_an_occupied_port_of_the_master():
    (row,) = network.examine_nodes("no.such.host.invalid:8000", 2, 1.0, {})
    assert row.status is Status.FAIL and "no.such.host.invalid is not known" in row.found
    (row,) = network.examine_nodes("nothing", 2, 1.0, {})
    assert row.status is Status.FAIL and "HOST:PORT" in row.found
    with socket.create_server(("", 0)) as other:
        master = f"127.0.0.1:{other.getsockname()[1]}"
        rows = by_name(network.examine_nodes(master, 2, 1.0, {"POD_IP": "127.0.0.1"}))
    assert rows["--master"].status is Status.FAIL and "cannot be opened" in rows["--master"].found
    assert (
        rows["own address"].status is Status.FAIL and "reaches no other machine" in rows["own address"].found
    )


def test_an_announced_address_that_is_not_ours_is_named():
    row = network.address_row("203.0.113.9", "10.0.0.1", "127.0.0.1", is_first=False)
    assert row.status is Status.FAIL and "not this machine's" in row.found and "POD_IP=" in row.fix
    own = next(one.address for one in interfaces() if one.address)
    if not own.startswith("127."):
        row = network.address_row(own, "first.example", own, is_first=True)
        assert row.status is Status.FAIL and f"--master {own}:PORT" in row.fix
        assert network.address_row(own, own, own, is_first=True) is None


# -- interfaces ------------------------------------------------------------------------------------

FOUND = [
    Interface("lo", "127.0.0.1", True, True),
    Interface("eth0", "10.0.0.2", True),
    Interface("eth1", "", True),
    Interface("ib0", "10.1.0.2", False),
]


@pytest.mark.parametrize(
    ("variable", "value", "status", "words"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", Status.OK, "eth0 10.0.0.2"),
        ("NCCL_SOCKET_IFNAME", "=eth0", Status.OK, "eth0"),
        ("NCCL_SOCKET_IFNAME", "^ib", Status.OK, "eth0"),
        ("NCCL_SOCKET_IFNAME", "bond0", Status.FAIL, "no such interface"),
        ("NCCL_SOCKET_IFNAME", "ib0", Status.FAIL, "ib0 10.1.0.2 (down)"),
        ("GLOO_SOCKET_IFNAME", "eth1", Status.FAIL, "without an address"),
        ("GLOO_SOCKET_IFNAME", "lo", Status.FAIL, "loopback"),
    ],
)
def test_interfaces_that_the_environment_names(variable, value, status, words):
    target = Target(world_size=2, local_size=1, environ={variable: value})
    (row,) = named_rows(target, FOUND)
    assert row.status is status and words in row.found
    assert status is Status.OK or "eth0" in row.fix
