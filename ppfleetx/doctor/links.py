"""From each machine to each other one: whether connections open, whether what is sent arrives, how fast."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from ppfleetx.doctor.case import Case
from ppfleetx.doctor.interfaces import named_addresses
from ppfleetx.doctor.meeting import Answer, Meeting
from ppfleetx.doctor.rows import Row, Status, fail, ok
from ppfleetx.doctor.storage import words

_THREADS = 32
_REACH_SECONDS, _SEND_SECONDS, _ROUND_SECONDS = 5.0, 5.0, 60.0
_MEASURE_SECONDS, _ALL_SECONDS = 0.1, 20.0  # of one trial, and of all links of a machine
_TRIALS = 6
_FEW_BYTES, _PACKETS_BYTES, _MOST_BYTES = 64, 64 << 10, 16 << 20
_HEAD = struct.Struct("!I")
_SLOW, _TOO_SLOW = 12.5e6, 1.25e6  # bytes a second: 100 and 10 Mbit/s
_TIMES_SLOWER = 10
_SENT_AGAIN, _SEGMENTS_OUT = 100, 136  # places in tcp_info (linux/tcp.h)
_LEAST_SEGMENTS, _LOSSY, _TOO_LOSSY = 200, 0.03, 0.15  # a busy machine sends some again without a loss
_OPEN_CURE = "NCCL and Gloo open ports of their own: let the machines reach each other on all ports"
_FIREWALL_CURE = "a firewall or proxy opens connections and drops what they carry: let it through"
_MTU_CURE = (
    "large packets get lost: give all machines, and the switches between them, one MTU "
    "(ip link; ip link set dev NAME mtu 1500), and let ICMP through"
)
_SLOW_CURE = (
    "look at the cable and at what it has agreed on (ethtool NAME), at limits (tc qdisc show), at other "
    "traffic, and that the address is of the fast network (POD_IP, NCCL_SOCKET_IFNAME)"
)
_LOSS_CURE = "look at the cable, its plugs and the switch (ip -s link: errors, dropped), and at other traffic"


def reach(address: tuple[str, int], seconds: float) -> str:
    """Why a connection to ``address`` fails; empty where it does not."""
    try:
        socket.create_connection(address, seconds).close()
    except TimeoutError:
        return "nothing comes back"
    except OSError as error:
        return error.strerror or str(error)
    return ""


@contextlib.contextmanager
def receiving() -> Iterator[int]:
    """A port of this machine that takes what :func:`send` sends, until the end."""
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
    """Seconds until ``count`` bytes have arrived and that was said.

    Raises:
        OSError: they have not, or not in time.
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


def lost_share(connection: socket.socket) -> float:
    """Packets that had to be sent again, of all that were; 0 where the system does not tell."""
    if not hasattr(socket, "TCP_INFO"):
        return 0.0
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SEGMENTS_OUT + 4)
    if len(told) < _SEGMENTS_OUT + 4:
        return 0.0
    again, sent = (struct.unpack_from("I", told, place)[0] for place in (_SENT_AGAIN, _SEGMENTS_OUT))
    return again / max(sent, _LEAST_SEGMENTS)


def measure_link(address: tuple[str, int]) -> dict[str, Any]:
    """``speed`` in bytes a second, ``trip`` in seconds, ``lost`` as the share of packets, of a link.

    The best of some trials: other programs of the machines have their share of link and processor.
    """
    try:
        with socket.create_connection(address, _REACH_SECONDS) as connection:
            trip = min(send(connection, _FEW_BYTES) for _ in range(3))
            count, best = _PACKETS_BYTES, 0.0
            for _ in range(_TRIALS):
                best = max(best, count / send(connection, count))
                if best > _SLOW and count > _PACKETS_BYTES:
                    break
                count = min(_MOST_BYTES, max(_PACKETS_BYTES, int(best * _MEASURE_SECONDS)))
            lost = lost_share(connection)
    except OSError as error:
        return {"problem": error.strerror or "nothing comes back", "cure": _OPEN_CURE}
    return {"speed": best, "trip": trip, "lost": lost}


def examine_links(meeting: Meeting, own: str, port: int, environ: Mapping[str, str]) -> Iterator[Row]:
    """Rows of all links; every member of the meeting calls this.

    Args:
        own: address of this machine.
        port: that :func:`receiving` gave.
        environ: may name the interfaces of NCCL and Gloo.
    """
    named = named_addresses(Case(environ=environ))
    told = meeting.exchange([own, port, named], _ROUND_SECONDS)
    size = len(told)
    order = [(meeting.number + step) % size for step in range(1, size)]  # nobody is everybody's first
    there = {n: told[n].value for n in order if not told[n].problem}
    with ThreadPoolExecutor(_THREADS) as pool:
        addresses = [(value[0], value[1]) for value in there.values()]
        mine = dict(zip(there, pool.map(try_link, addresses), strict=True))
        wrong = list(pool.map(lambda one: _named_problems(*one), there.items()))
    end = time.monotonic() + _ALL_SECONDS
    for number, address in zip(there, addresses, strict=True):
        if not mine[number] and time.monotonic() < end:
            mine[number] = measure_link(address)
    value = {"links": {str(n): link for n, link in mine.items()}, "named": dict(chain(*wrong))}
    yield from link_rows(meeting.names, meeting.exchange(value, 2 * _ROUND_SECONDS))


def _named_problems(number: int, told: Sequence[Any]) -> list[tuple[str, str]]:
    """What of the interfaces that a machine's variables name cannot be reached from here."""
    own, port, named = told
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
    failed, measured = False, {}
    for name, answer in zip(names, answers, strict=True):
        if answer.problem:
            failed = True
            yield fail("links", f"{name} has left: {answer.problem}", "look at that machine")
            continue
        for other, link in answer.value["links"].items():
            if "problem" in link:
                failed = True
                yield fail(
                    "links", f"{name} does not reach {names[int(other)]}: {link['problem']}", link["cure"]
                )
            elif "speed" in link:
                measured[name, names[int(other)]] = link
        for key, problem in answer.value["named"].items():
            other, variable = key.split(" ")
            yield fail(
                variable,
                f"{name} does not reach {names[int(other)]} at the interface that it names: {problem}",
                f"name an interface of the network in which the machines meet, in {variable} of that machine",
            )
    if not failed:
        yield ok("links", f"each of the {len(names)} machines reaches the others on a port of any number")
    yield from speed_rows({link: (found["speed"], found["trip"]) for link, found in measured.items()})
    yield from loss_rows({link: found["lost"] for link, found in measured.items()})


def loss_rows(lost: Mapping[tuple[str, str], float]) -> Iterator[Row]:
    """Rows of links that lose packets: ``{(from, to): share}``."""
    for (one, other), share in lost.items():
        if share > _LOSSY:
            text = f"{one} to {other}: {share:.0%} of the packets had to be sent again"
            status = Status.FAIL if share > _TOO_LOSSY else Status.WARN
            yield Row("packets lost", status, text, _LOSS_CURE, numbers={"share": share})


def speed_rows(speeds: Mapping[tuple[str, str], tuple[float, float]]) -> Iterator[Row]:
    """Rows of the speeds: ``{(from, to): (bytes a second, seconds of a message both ways)}``."""
    if not speeds:
        return
    best = max(speed for speed, _ in speeds.values())
    slow = {link: status for link, (speed, _) in speeds.items() if (status := _judged(speed, best))}
    for (one, other), status in slow.items():
        speed, trip = speeds[one, other]
        text = f"{one} to {other}: {words(speed)}/s, a message both ways takes {trip * 1e3:.1f} ms"
        if best > _TIMES_SLOWER * speed:
            text += f"; the fastest link has {words(best)}/s"
        yield Row("speed", status, text, _SLOW_CURE, numbers={"bytes_per_second": speed})
    if not slow:
        speed, trip = min(speeds.values())[0], max(trip for _, trip in speeds.values())
        text = f"the slowest link has {words(speed)}/s; a message both ways takes {trip * 1e3:.1f} ms at most"
        yield ok("speed", text, bytes_per_second=speed)


def _judged(speed: float, best: float) -> Status | None:
    is_last = best > _TIMES_SLOWER * speed
    if speed < _TOO_SLOW or (is_last and speed < _SLOW):
        return Status.FAIL
    return Status.WARN if speed < _SLOW or (is_last and speed < 10 * _SLOW) else None
