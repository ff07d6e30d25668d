"""Rendezvous of a job's processes. The first process listens, the others connect to it, and each gets the
names and addresses of all processes. Every wait has a time limit."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.message_text import ranks_text
from ppfleetx.distributed.cpu.keepalive import end_when_silent
from ppfleetx.utils.log import get_logger

Address = tuple[str, int]

MARGIN_SECONDS = 10.0
"""Seconds that the other processes wait beyond the time limit, so that the first process, which knows which
processes are missing, can report them."""
_LOG_AFTER_SECONDS = 10.0
_CONNECT_SECONDS, _RETRY_SECONDS = 5.0, 0.05
_ANSWER_SECONDS = 10.0
_SEND_SECONDS = 30.0
_SAME_FIX = "start all with the same --nnodes, --nproc and --master, and no other job at that address"


class RendezvousError(Exception):
    """Raised when the processes of a job could not all connect. The attribute ``fix`` tells the user what to
    do."""

    def __init__(self, found: str, fix: str) -> None:
        super().__init__(found)
        self.fix = fix


def meeting_point() -> Address:
    """Return the address (host, port) on which rank 0 listens for the other ranks, from environment variables
    of Paddle's launcher. Raises ConfigError if no variable contains an address."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not (host and port):
        endpoints = os.environ.get("PADDLE_MASTER") or os.environ.get("PADDLE_TRAINER_ENDPOINTS", "")
        host, _, port = endpoints.split(",")[0].rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            "not the HOST:PORT where the ranks of the job meet; start them with python -m "
            "paddle.distributed.launch",
            key="PADDLE_MASTER",
            value=os.environ.get("PADDLE_MASTER", ""),
            place="environment",
        )
    return host, int(port)


class JsonConnection:
    """A TCP connection that carries JSON messages, one per line. One thread can receive while others send."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._read = connection, bytearray()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._out, self._lock = connection.dup(), threading.Lock()
        self._out.settimeout(_SEND_SECONDS)

    def send(self, value: Any) -> None:
        with self._lock:
            self._out.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, deadline: float) -> Any:
        """Wait for the next message and return it. Raises TimeoutError at ``deadline`` (``time.monotonic``),
        and ConnectionError if the connection is closed or the message is not JSON."""
        while (value := self.buffered()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.connection.settimeout(left)
            self.fill()
        return value

    def fill(self) -> None:
        data = self.connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "connection closed")
        self._read += data

    def buffered(self) -> Any:
        """Return the next message if it has been read completely, or None. Raises ConnectionAbortedError if
        the message is not JSON."""
        line, end, rest = self._read.partition(b"\n")
        if not end:
            return None
        self._read = rest
        try:
            return json.loads(line)
        except ValueError:
            raise ConnectionAbortedError(errno.EPROTO, "it sends something other than JSON") from None

    def close(self) -> None:
        self.connection.close()
        self._out.close()


@dataclass(frozen=True)
class Member:
    """A process in the rendezvous, as it describes itself to the others.

    Attributes:
        name: the process's name in log and error messages.
        number: the process's number in the job; the process that listens is 0. With None, the process that
            listens assigns the number, in the order of arrival.
        address: the address on which the process accepts later connections; None if it accepts none.
    """

    name: str
    number: int | None = None
    address: Address | None = None


@dataclass
class Members:
    """The result of the rendezvous: all processes of the job.

    Attributes:
        number: the number of this process.
        names, addresses: names and addresses of all processes, by number.
        lines: this process's open connections, by the number of the process at the other end.
    """

    number: int
    names: list[str]
    addresses: list[Address | None]
    lines: dict[int, JsonConnection] = field(default_factory=dict)

    def close(self) -> None:
        for line in self.lines.values():
            line.close()


class _Wait:
    """The time limit of one wait, in ``seconds`` from now. A wait of more than 10 seconds is logged once."""

    def __init__(self, seconds: float) -> None:
        self._begin, self.seconds, self._is_logged = time.monotonic(), seconds, False

    def is_over(self, what: str) -> bool:
        waited = time.monotonic() - self._begin
        if waited > _LOG_AFTER_SECONDS and not self._is_logged:
            self._is_logged = True
            get_logger().info(f"{what}, for {self.seconds:g} s at most")
        return waited >= self.seconds

    def next_look(self) -> float:
        """Return how many seconds the caller can sleep before the next call of :meth:`is_over`."""
        until = self.seconds if self._is_logged else min(self.seconds, _LOG_AFTER_SECONDS)
        return max(self._begin + until - time.monotonic(), 0.0) + 0.001


# -- the process that listens ---------------------------------------------------------------------


# This does not use Paddle's TCPStore, which waits in C++ for missing ranks and cannot name them.
def receive(point: Address, size: int, own: Member, seconds: float) -> Members:
    """Run the listening side of the rendezvous: listen on the port of the address ``point``, and wait at most
    ``seconds`` for the other processes. ``size`` is the number of all processes, and ``own`` describes this
    process.

    Raises:
        RendezvousError: the port cannot be opened, a process does not connect in time, or a process ends
            before all have connected.
    """
    try:
        listener = socket.create_server(("", point[1]), backlog=size + 16)
    except OSError as error:
        raise RendezvousError(
            f"port {point[1]} of this machine cannot be opened: {error.strerror}",
            "another program, or a job that still runs, holds it: name another free port",
        ) from error
    reception = _Reception(point, size, own)
    with listener:
        try:
            reception.wait_for_all(listener, _Wait(seconds))
        except RendezvousError as error:
            reception.refuse_all(error)
            raise
    return reception.welcome_all()


class _Reception:
    def __init__(self, point: Address, size: int, own: Member) -> None:
        self._where, self._size = "{}:{}".format(*point), size
        self._came: dict[int, Member] = {0: own}
        self._lines: dict[int, JsonConnection] = {}
        # Addresses of connections that have not identified themselves.
        self._strangers: dict[JsonConnection, str] = {}
        self._refused: list[str] = []
        self._selector = selectors.DefaultSelector()

    def wait_for_all(self, listener: socket.socket, wait: _Wait) -> None:
        self._selector.register(listener, selectors.EVENT_READ)
        try:
            while missing := [number for number in range(self._size) if number not in self._came]:
                if wait.is_over(f"{self._came[0].name} waits for {self._listed(missing)} at {self._where}"):
                    raise self._incomplete(missing, wait.seconds)
                for key, _ in self._selector.select(wait.next_look()):
                    if key.fileobj is listener:
                        self._accept(listener)
                    elif not self._hear(key.data):
                        self._selector.unregister(key.fileobj)
                        self._strangers.pop(key.data, None)
                        key.data.close()
        finally:
            self._selector.close()
            for line in self._strangers:
                line.close()

    def welcome_all(self) -> Members:
        members = [self._came[number] for number in range(self._size)]
        names, addresses = [one.name for one in members], [one.address for one in members]
        for number, line in self._lines.items():
            with contextlib.suppress(OSError):  # the next use of a closed connection raises the error
                line.send({"number": number, "names": names, "addresses": addresses})
        return Members(0, names, addresses, self._lines)

    def refuse_all(self, error: RendezvousError) -> None:
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send({"refused": str(error), "fix": error.fix})
            line.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the other end may have closed already
            connection, address = listener.accept()
            end_when_silent(connection)
            line = JsonConnection(connection)
            self._strangers[line] = address[0]
            self._selector.register(connection, selectors.EVENT_READ, line)

    def _hear(self, line: JsonConnection) -> bool:
        """Read the data that has arrived on the connection ``line``. Returns False if the caller must close
        the connection because it is not from a process of the job. Raises RendezvousError if an admitted
        process has ended."""
        try:
            line.fill()
            said = line.buffered() if line in self._strangers else None
        except OSError as error:
            if line in self._strangers:
                return False
            name = next(self._came[number].name for number, one in self._lines.items() if one is line)
            raise RendezvousError(
                f"{name} ended before all had connected ({error.strerror})",
                "look at its log (workerlog.N of its machine)",
            ) from error
        return True if said is None else self._admit(line, said)

    def _admit(self, line: JsonConnection, said: Any) -> bool:
        if not isinstance(said, dict) or not said.keys() >= {"name", "number", "size", "address"}:
            return False
        name, number, size, address = (said[key] for key in ("name", "number", "size", "address"))
        if number is None:
            name, number = f"{name} ({self._strangers[line]})", len(self._came)
        why = ""
        if size != self._size:
            why = f"the job that meets at {self._where} has {self._size} members, not {size}"
        elif number in self._came or not 0 < number < self._size:
            why = f"number {number} is there already: two jobs meet at {self._where}"
        with contextlib.suppress(OSError):
            line.send({"refused": why, "fix": _SAME_FIX} if why else {})
        if why:
            self._refused.append(f"{name}: {why}")
            return False
        del self._strangers[line]
        self._came[number] = Member(name, number, address and tuple(address))
        self._lines[number] = line
        return True

    def _listed(self, numbers: Sequence[int]) -> str:
        if self._came[0].number is None:
            return f"{len(numbers)} of {self._size - 1} others"
        return ranks_text(numbers)

    def _incomplete(self, missing: Sequence[int], seconds: float) -> RendezvousError:
        text = f"{self._listed(missing)} did not connect to {self._where} within {seconds:g} s"
        if self._refused:
            text += f"; turned away: {'; '.join(dict.fromkeys(self._refused))}"
        return RendezvousError(
            text,
            "start all of them with the same address, and let them through a firewall; if one was started, "
            "look at its log (workerlog.N of its machine)",
        )


# -- the others -----------------------------------------------------------------------------------


def visit(point: Address, size: int, own: Member, seconds: float) -> Members:
    """Run the connecting side of the rendezvous: connect to the first process at the address ``point``, and
    wait until the first process reports that all processes have connected. The wait takes at most about
    ``seconds`` plus :data:`MARGIN_SECONDS`. ``size`` is the number of all processes, and ``own`` describes
    this process.

    Raises:
        RendezvousError: no valid answer arrives, or the first process reports an error.
    """
    first = f"{'rank 0' if own.number is not None else 'the first machine'} at {{}}:{{}}".format(*point)
    deadline = time.monotonic() + seconds
    line = JsonConnection(_connect(point, own.name, first, _Wait(seconds)))
    is_heard = False
    try:
        line.send({"name": own.name, "number": own.number, "size": size, "address": own.address})
        said = line.receive(time.monotonic() + _ANSWER_SECONDS)
        is_heard = True
        if "refused" not in said:
            said = line.receive(deadline + MARGIN_SECONDS)
        if "refused" not in said:
            addresses = [one and tuple(one) for one in said["addresses"]]
            return Members(said["number"], said["names"], addresses, {0: line})
    except TimeoutError as error:
        line.close()
        raise _silent(first, seconds, is_heard=is_heard) from error
    except OSError as error:
        line.close()
        raise RendezvousError(
            f"{first} ended before all had connected, or what answers there is something else: {error}",
            "look at its log; does another program hold that port?",
        ) from error
    line.close()
    raise RendezvousError(f"{first} says: {said['refused']}", said["fix"])


def _connect(point: Address, name: str, first: str, wait: _Wait) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection(point, max(0.2, min(_CONNECT_SECONDS, wait.next_look())))
            if connection.getsockname() != connection.getpeername():
                end_when_silent(connection)
                return connection
            # If nobody listens on a local port, TCP may connect the port to itself.
            connection.close()
            problem: OSError = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        except OSError as error:
            problem = error
        if wait.is_over(f"{name} waits for {first} to listen ({problem})"):
            raise _unreachable(first, problem, wait.seconds) from problem
        time.sleep(_RETRY_SECONDS)


def _silent(first: str, seconds: float, *, is_heard: bool) -> RendezvousError:
    if is_heard:
        return RendezvousError(
            f"{first} gave no answer within {seconds:g} s",
            "it is stopped, or its machine does not answer: look at its log and its machine",
        )
    return RendezvousError(
        f"a connection to {first} opens, and nothing comes through it",
        "a firewall or proxy drops the data, or another program holds that port: let it through, or name "
        "another port",
    )


def _unreachable(first: str, error: OSError, seconds: float) -> RendezvousError:
    if isinstance(error, socket.gaierror):
        why = f"the name is not known here ({error.strerror})"
        fix = "give the address instead of the name, or add it to /etc/hosts of this machine"
    elif isinstance(error, ConnectionRefusedError):
        why, fix = f"nobody listens there ({error.strerror})", "start it, and compare its address and port"
    elif isinstance(error, TimeoutError):
        why = "nothing comes back"
        fix = "a firewall drops what goes to that port, or the address is of another network: open the port"
    else:
        why = f"it cannot be reached ({error.strerror})"
        fix = "is the address right, and is the network up?"
    return RendezvousError(f"no connection to {first} within {seconds:g} s: {why}", fix)
