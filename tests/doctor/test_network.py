"""Links between machines, addresses and interfaces, with real sockets."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ppfleetx.doctor import network
from ppfleetx.doctor.network import Interface, interfaces, link_rows, named_rows, reach
from ppfleetx.doctor.process_connections import Answer
from ppfleetx.doctor.results import Status, Target
from tests.doctor.conftest import by_name
from tests.helpers.ranks import free_port

NAMES = ["node a", "node b"]


def test_links_that_work_and_links_that_do_not():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert reach(listener.getsockname()) == ""
    assert reach(("127.0.0.1", free_port())) == "Connection refused"
    rows = list(link_rows(NAMES, [Answer({"1": "Connection refused"}), Answer(problem="it ended")]))
    assert [row.status for row in rows] == [Status.FAIL] * 2
    assert "node a does not reach node b: Connection refused" in rows[0].found
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


@pytest.mark.parametrize(
    ("master", "found"),
    [
        ("no.such.host.invalid:8000", "no.such.host.invalid is not known"),
        ("nothing", "HOST:PORT"),
        ("127.0.0.1:99999", "HOST:PORT"),
    ],
)
def test_a_master_that_nobody_knows_is_named(master, found):
    (row,) = network.examine_nodes(master, 2, 1.0, {})
    assert row.status is Status.FAIL and found in row.found


def test_an_occupied_port_of_the_master_is_named():
    with socket.create_server(("", 0)) as other:
        master = f"127.0.0.1:{other.getsockname()[1]}"
        rows = by_name(network.examine_nodes(master, 2, 1.0, {"POD_IP": "127.0.0.1"}))
    for name, found in (("--master", "cannot be opened"), ("own address", "reaches no other machine")):
        assert rows[name].status is Status.FAIL and found in rows[name].found


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
