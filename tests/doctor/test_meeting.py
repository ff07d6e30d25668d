"""Processes that have met exchange values; machines and their addresses, clocks and interfaces."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ppfleetx.distributed.rendezvous import RendezvousError
from ppfleetx.doctor import meeting as meeting_module
from ppfleetx.doctor import network
from ppfleetx.doctor.check import Status, Target
from ppfleetx.doctor.meeting import open_meeting
from ppfleetx.doctor.network import Interface, interfaces, named_rows, nccl_choice
from tests.doctor.conftest import by_name
from tests.helpers.ranks import ROOT, free_port


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
            assert rows["speed"].status is not Status.FAIL  # the machine may be busy


def test_a_second_address_of_an_interface_is_this_machine_s():
    text = (
        "from ppfleetx.doctor.network import is_local; "
        "print(*[is_local(f'10.77.3.{number}') for number in (1, 2, 3)], is_local('no.such.host'))"
    )
    steps = ["ip link set lo up", *(f"ip address add 10.77.3.{number}/32 dev lo" for number in (1, 2))]
    script = " && ".join([*steps, 'exec "$@"'])
    command = ["unshare", "-n", "sh", "-c", script, "sh", sys.executable, "-c", text]
    if shutil.which("unshare") is None or shutil.which("ip") is None or os.geteuid():
        pytest.skip("needs root, unshare and ip")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "True", "False", "False"]


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


def test_interfaces_of_this_machine():
    assert any(one.is_loopback and one.address == "127.0.0.1" for one in interfaces())
    assert [one.name for one in nccl_choice("=eth", FOUND)] == []
