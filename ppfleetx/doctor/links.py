"""From each machine to each other one: whether connections open, whether data arrives, and how fast."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ppfleetx.doctor.case import Case
from ppfleetx.doctor.interfaces import named_addresses
from ppfleetx.doctor.meeting import Answer, Meeting
from ppfleetx.doctor.rows import Row, Status, fail, ok
from ppfleetx.doctor.storage import words

_THREADS = 32
_REACH_SECONDS, _SEND_SECONDS, _ROUND_SECONDS = 5.0, 5.0, 60.0
_ALL_SECONDS = 20.0  # for measuring all links of a machine
_FEW_BYTES, _PACKETS_BYTES, _MOST_BYTES = 64, 64 << 10, 16 << 20
_HEAD = struct.Struct("!I")
_SLOW, _TOO_SLOW = 12.5e6, 1.25e6  # bytes a second: 100 and 10 Mbit/s
_TIMES_SLOWER = 10
_OPEN_CURE = "NCCL and Gloo open ports of their own: let the machines reach each other on all ports"
_FIREWALL_CURE = "a firewall or proxy opens connections and drops the data: let it through"
_MTU_CURE = (
    "large packets get lost: give all machines, and the switches between them, one MTU "
    "(ip link; ip link set dev NAME mtu 1500), and let ICMP through"
)
_SLOW_CURE = (
    "look at the cable and its speed (ethtool NAME), at limits (tc qdisc show), at other traffic, and "
    "whether the address is of the fast network (POD_IP, NCCL_SOCKET_IFNAME)"
)


def reach(address: tuple[str, int], seconds: float) -> str:
    """Why a connection to ``address`` fails; empty if it does not."""
    try:
        socket.create_connection(address, seconds).close()
    except TimeoutError:
        return "nothing comes back"
    except OSError as error:
        return error.strerror or str(error)
    return ""


@contextlib.contextmanager
def receiving() -> Iterator[int]:
    """A port of this machine that takes what :func:`send` sends, within the block."""
    with socket.create_server(("", 0), backlog=1024) as listener:
        threading.Thread(target=_serve, args=(listener,), name="links", daemon=True).start()
        yield listener.getsockname()[1]


def _serve(listener: socket.socket) -> None:
    with ThreadPoolExecutor(_THREADS) as pool, contextlib.suppress(OSError):  # the listener is closed
        while True:
            pool.submit(_take, listener.accept()[0])


def _take(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(2 * _SEND_SECONDS)
        while len(head := connection.recv(_HEAD.size, socket.MSG_WAITALL)) == _HEAD.size:
            count = left = min(_HEAD.unpack(head)[0], _MOST_BYTES)
            while left and (data := connection.recv(min(left, 1 << 20))):
                left -= len(data)
            connection.sendall(_HEAD.pack(count))


def send(connection: socket.socket, count: int) -> float:
    """Send ``count`` bytes and wait for the receipt; returns the seconds.

    Raises:
        OSError: they have not arrived in time.
    """
    begin = time.perf_counter()
    connection.settimeout(_SEND_SECONDS)
    connection.sendall(_HEAD.pack(count) + bytes(count))
    if connection.recv(_HEAD.size, socket.MSG_WAITALL) != _HEAD.pack(count):
        raise ConnectionResetError(errno.ECONNRESET, "something else answers")
    return time.perf_counter() - begin


def try_link(address: tuple[str, int]) -> dict[str, Any]:
    """``problem`` and ``cure`` of a link, or nothing."""
    if problem := reach(address, _REACH_SECONDS):
        return {"problem": problem, "cure": _OPEN_CURE}
    done = 0
    try:
        with socket.create_connection(address, _REACH_SECONDS) as connection:
            for count in (_FEW_BYTES, _PACKETS_BYTES):
                send(connection, count)
                done = count
    except OSError:
        what = "nothing that is sent arrives" if not done else f"{words(_PACKETS_BYTES)} do not arrive"
        return {
            "problem": f"a connection opens, and {what} within {_SEND_SECONDS:g} s",
            "cure": _MTU_CURE if done else _FIREWALL_CURE,
        }
    return {}


def measure_link(address: tuple[str, int]) -> dict[str, Any]:
    """``speed`` in bytes a second; the best of some trials, because machines have other work too."""
    count, best = _PACKETS_BYTES, 0.0
    try:
        with socket.create_connection(address, _REACH_SECONDS) as connection:
            for _ in range(4):
                best = max(best, count / send(connection, count))
                count = min(_MOST_BYTES, max(_PACKETS_BYTES, int(best / 10)))  # 0.1 s
    except OSError as error:
        return {"problem": error.strerror or "nothing comes back", "cure": _OPEN_CURE}
    return {"speed": best}


def examine_links(meeting: Meeting, own: str, port: int, environ: Mapping[str, str]) -> Iterator[Row]:
    """Rows of all links; every member of the meeting calls this.

    Args:
        own: address of this machine.
        port: what :func:`receiving` gave.
        environ: may name the interfaces of NCCL and Gloo.
    """
    announced = meeting.exchange([own, port, named_addresses(Case(environ=environ))], _ROUND_SECONDS)
    size = len(announced)
    order = [(meeting.number + step) % size for step in range(1, size)]  # not all start with the same
    there = {n: announced[n].value for n in order if not announced[n].problem}
    addresses = {n: (value[0], value[1]) for n, value in there.items()}
    with ThreadPoolExecutor(_THREADS) as pool:
        mine = dict(zip(there, pool.map(try_link, addresses.values()), strict=True))
        unreached = list(pool.map(lambda one: _unreached_interfaces(*one), there.items()))
    end = time.monotonic() + _ALL_SECONDS
    for number, address in addresses.items():
        if not mine[number] and time.monotonic() < end:
            mine[number] = measure_link(address)
    named = dict(pair for pairs in unreached for pair in pairs)
    value = {"links": {str(n): link for n, link in mine.items()}, "named": named}
    yield from link_rows(meeting.names, meeting.exchange(value, 2 * _ROUND_SECONDS))


def _unreached_interfaces(number: int, announced: Sequence[Any]) -> list[tuple[str, str]]:
    """The interfaces in a machine's variables that cannot be reached from here."""
    own, port, named = announced
    return [
        (f"{number} {variable}", f"{address}: {problem}")
        for variable, addresses in named.items()
        for address in addresses
        if address != own and (problem := reach((address, port), _REACH_SECONDS))
    ]


def link_rows(names: Sequence[str], answers: Sequence[Answer]) -> Iterator[Row]:
    """Rows of what each machine has found.

    Args:
        names: of the machines.
        answers: ``{"links": {number: link}, "named": {"number variable": problem}}`` of each.
    """
    failed, speeds = False, {}
    for name, answer in zip(names, answers, strict=True):
        if answer.problem:
            failed = True
            yield fail("links", f"{name} has left: {answer.problem}", "look at that machine")
            continue
        for number, link in answer.value["links"].items():
            other = names[int(number)]
            if "problem" in link:
                failed = True
                yield fail("links", f"{name} does not reach {other}: {link['problem']}", link["cure"])
            elif "speed" in link:
                speeds[name, other] = link["speed"]
        for key, problem in answer.value["named"].items():
            number, variable = key.split(" ")
            yield fail(
                variable,
                f"{name} does not reach {names[int(number)]} at the interface that it names: {problem}",
                f"name an interface of the network in which the machines meet, in {variable} of that machine",
            )
    if not failed:
        yield ok("links", f"each of the {len(names)} machines reaches the others on an arbitrary port")
    yield from speed_rows(speeds)


def speed_rows(speeds: Mapping[tuple[str, str], float]) -> Iterator[Row]:
    """Rows of the speeds: ``{(from, to): bytes a second}``."""
    if not speeds:
        return
    best = max(speeds.values())
    slow = {link: status for link, speed in speeds.items() if (status := _judged(speed, best))}
    for (one, other), status in slow.items():
        speed = speeds[one, other]
        text = f"{one} to {other}: {words(speed)}/s; the fastest link has {words(best)}/s"
        yield Row("speed", status, text, _SLOW_CURE, numbers={"bytes_per_second": speed})
    if not slow:
        speed = min(speeds.values())
        yield ok("speed", f"the slowest link has {words(speed)}/s", bytes_per_second=speed)


def _judged(speed: float, best: float) -> Status | None:
    is_last = best > _TIMES_SLOWER * speed
    if speed < _TOO_SLOW or (is_last and speed < _SLOW):
        return Status.FAIL
    return Status.WARN if speed < _SLOW or (is_last and speed < 10 * _SLOW) else None
