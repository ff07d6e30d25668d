"""Processes that meet over plain sockets before they trust anything else, and exchange values.

One of them is the host and listens, the others are its guests. Every wait ends within a known time, and then
says who did not answer and what it was doing when it was last heard of. While members work, a thread of each
says that its process runs; so one that is stopped is told from one that is slow.
"""

from __future__ import annotations

import contextlib
import errno
import json
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

_GREETING = "ppfleetx doctor"
_CONNECT_SECONDS, _AGAIN_SECONDS, _SEND_SECONDS = 5.0, 0.1, 30.0
_LONGEST_LINE = 64 << 20
_MARGIN_SECONDS = 10.0  # that guests wait longer than the host, which says who is missing
_PULSE_SECONDS = 1.0
_LEAST_QUIET_SECONDS = 60.0  # what loads a large library lets no other thread of its process run


class MeetingError(Exception):
    """The processes cannot meet; ``cure`` says what to do."""

    def __init__(self, found: str, cure: str) -> None:
        super().__init__(found)
        self.cure = cure


@dataclass(frozen=True)
class Answer:
    """What one member said in a round: a value, or what is wrong with the member."""

    value: Any = None
    problem: str = ""


@dataclass(frozen=True)
class Clock:
    """A guest's clock against the host's: seconds that it is ahead, and those of a message both ways."""

    ahead: float
    round_trip: float


class Meeting(Protocol):
    """A member's side.

    Attributes:
        number: of this member; the host's is 0.
        names: of all members, by number.
        clocks: of the guests, by number; the host's alone are filled.
    """

    number: int
    names: list[str]
    clocks: dict[int, Clock]

    def tell(self, place: str) -> None:
        """Say what this member does now; it is named with it when it does not answer."""

    def exchange(self, value: Any, seconds: float, quiet: float | None = None) -> list[Answer]:
        """Everybody's value by number, the same on all; all members call this in the same order.

        Args:
            value: of this member.
            seconds: in which nobody gets further: each value, and each :meth:`tell`, is a step.
            quiet: in which nothing at all is heard of a member, which is stopped then; None: those that
                members waited for each other, and at least a minute.

        Raises:
            MeetingError: the host is gone.
        """

    def close(self) -> None:
        """Leave."""


class _Line:
    """A connection that carries one JSON value a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._read = connection, bytearray()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # With a timeout of its own: one thread may wait for a message while another sends.
        self._out, self._lock = connection.dup(), threading.Lock()
        self._out.settimeout(_SEND_SECONDS)

    def send(self, value: Any) -> None:
        with self._lock:
            self._out.sendall(json.dumps(value).encode() + b"\n")

    def close(self) -> None:
        self.connection.close()
        self._out.close()

    def receive(self, deadline: float) -> Any:
        """The next value; TimeoutError at ``deadline`` (monotonic), ConnectionError without the other."""
        while (value := self.waiting()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.connection.settimeout(left)
            self.fill()
        return value

    def fill(self) -> None:
        """Take what has come."""
        data = self.connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "connection closed")
        self._read += data
        if len(self._read) > _LONGEST_LINE:
            raise ConnectionAbortedError(errno.EMSGSIZE, "a message that is too long")

    def waiting(self) -> Any:
        """A value that has come whole, or None."""
        line, end, rest = self._read.partition(b"\n")
        if not end:
            return None
        self._read = rest
        try:
            return json.loads(line)
        except ValueError:
            raise ConnectionAbortedError(errno.EPROTO, "not a message of doctor") from None


class _Pulse:
    """Says to the others that this process runs, whatever its main thread does."""

    def __init__(self, lines: Iterable[_Line]) -> None:
        self._lines, self._over = list(lines), threading.Event()
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def _beat(self) -> None:
        while not self._over.wait(_PULSE_SECONDS):
            for line in self._lines:
                with contextlib.suppress(OSError):  # exchange says who is gone
                    line.send({"alive": True})

    def stop(self) -> None:
        self._over.set()


def _silence_limit(quiet: float, seconds: float) -> float:
    """No longer than a whole wait, and some beats of a pulse at least."""
    return max(min(quiet, seconds), 3 * _PULSE_SECONDS)


def _silence(seconds: float, place: str) -> str:
    return (
        f"nothing was heard of it for {seconds:g} s: its process is stopped, or its machine does not answer; "
        f"it was last heard of at: {place}"
    )


@dataclass
class _Guest:
    """A member, seen by the host."""

    line: _Line
    place: str = "its start"
    problem: str = ""
    heard: float = 0.0  # of anything (monotonic)
    moved: float = 0.0  # of a step


@dataclass
class Host:
    """The member that listens."""

    names: list[str]
    number: int = 0
    clocks: dict[int, Clock] = field(default_factory=dict)
    guests: dict[int, _Guest] = field(default_factory=dict)
    quiet: float = _LEAST_QUIET_SECONDS
    _pulse: _Pulse | None = None

    def begin(self) -> None:
        """All have come."""
        for number, guest in self.guests.items():
            guest.line.send({"members": self.names, "number": number})
        self._pulse = _Pulse(guest.line for guest in self.guests.values())

    def tell(self, place: str) -> None:
        self._send({"at": place})

    def exchange(self, value: Any, seconds: float, quiet: float | None = None) -> list[Answer]:
        quiet, begun = _silence_limit(quiet or self.quiet, seconds), time.monotonic()
        answers = {0: Answer(value)}
        with selectors.DefaultSelector() as selector:
            for number, guest in self.guests.items():
                if guest.problem:
                    answers[number] = Answer(problem=guest.problem)
                    continue
                guest.heard = guest.moved = begun
                guest.line.connection.setblocking(False)
                selector.register(guest.line.connection, selectors.EVENT_READ, number)
            while selector.get_map():
                self._give_up(seconds, quiet, answers, selector)
                for key, _ in selector.select(min(_PULSE_SECONDS, quiet / 4)):
                    answer = self._hear(self.guests[key.data])
                    if answer is not None:
                        answers[key.data] = answer
                        selector.unregister(key.fileobj)
        ordered = [answers[number] for number in range(len(self.names))]
        self._send({"all": [[answer.value, answer.problem] for answer in ordered]})
        return ordered

    def _give_up(
        self, seconds: float, quiet: float, answers: dict[int, Answer], selector: selectors.BaseSelector
    ) -> None:
        """Wait no longer for who is silent, nor, where nobody gets further, for anybody."""
        now = time.monotonic()
        waiting = [number for number in self.guests if number not in answers]
        last = max(guest.moved for guest in self.guests.values())
        for number in waiting:
            guest = self.guests[number]
            if now - guest.heard > quiet:
                guest.problem = _silence(quiet, guest.place)
            elif now - last > seconds:
                guest.problem = f"no answer within {seconds:g} s; it was last heard of at: {guest.place}"
            else:
                continue
            answers[number] = Answer(problem=guest.problem)
            selector.unregister(guest.line.connection)

    def _hear(self, guest: _Guest) -> Answer | None:
        try:
            guest.line.fill()
            guest.heard = time.monotonic()
            while (message := guest.line.waiting()) is not None:
                if "alive" in message:
                    continue
                guest.moved = guest.heard
                if "value" in message:
                    return Answer(message["value"])
                guest.place = str(message.get("at", guest.place))
        except OSError as error:
            guest.problem = f"it ended at: {guest.place} ({error.strerror})"
            return Answer(problem=guest.problem)
        return None

    def _send(self, message: Any) -> None:
        for guest in self.guests.values():
            if not guest.problem:
                with contextlib.suppress(OSError):  # the next round tells
                    guest.line.send(message)

    def close(self) -> None:
        if self._pulse is not None:
            self._pulse.stop()
        for guest in self.guests.values():
            guest.line.close()


@dataclass
class Visitor:
    """Another member."""

    names: list[str]
    number: int
    line: _Line
    where: str
    clocks: dict[int, Clock] = field(default_factory=dict)
    place: str = "its start"
    quiet: float = _LEAST_QUIET_SECONDS

    def __post_init__(self) -> None:
        self._pulse = _Pulse([self.line])

    def tell(self, place: str) -> None:
        with contextlib.suppress(OSError):  # exchange says that the host is gone
            self.line.send({"at": place})

    def exchange(self, value: Any, seconds: float, quiet: float | None = None) -> list[Answer]:
        quiet, moved = _silence_limit(quiet or self.quiet, seconds), time.monotonic()
        why = ""
        try:
            self.line.send({"value": value})
            while True:
                heard = time.monotonic()
                end = min(heard + quiet, moved + seconds)
                if (said := self._hear(end + _MARGIN_SECONDS)) is None:
                    if end == heard + quiet:
                        why = _silence(quiet + _MARGIN_SECONDS, self.place)
                    break
                if "all" in said:
                    return [Answer(value, problem) for value, problem in said["all"]]
                if "at" in said:
                    self.place, moved = str(said["at"]), time.monotonic()
            problem = f"no answer within {seconds + _MARGIN_SECONDS:g} s"
        except OSError as error:
            problem = error.strerror or str(error)
        raise MeetingError(
            f"{self.names[0]} at {self.where} is gone: "
            + (why or f"{problem}; it was last heard of at: {self.place}"),
            "look at that machine and its log",
        )

    def _hear(self, deadline: float) -> Any:
        try:
            return self.line.receive(deadline)
        except TimeoutError:
            return None

    def close(self) -> None:
        self._pulse.stop()
        self.line.close()


# -- how they meet ---------------------------------------------------------------------------------


def receive_guests(port: int, size: int, name: str, seconds: float) -> Host:
    """Listen until all others of ``size`` members have come.

    Raises:
        MeetingError: the port is taken, or somebody did not come; those who came are told.
    """
    try:
        listener = socket.create_server(("", port), backlog=size + 16)
    except OSError as error:
        raise MeetingError(
            f"port {port} of this machine cannot be opened: {error.strerror}",
            "another program, or a job that still runs, holds it: give all machines another free port",
        ) from error
    host = Host([name, *[""] * (size - 1)], quiet=max(seconds, _LEAST_QUIET_SECONDS))
    deadline = time.monotonic() + seconds
    with listener:
        while len(host.guests) < size - 1 and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            with contextlib.suppress(OSError):  # nobody, or a stranger
                connection, address = listener.accept()
                _welcome(host, _Line(connection), address[0], size)
    missing = [number for number in range(1, size) if number not in host.guests]
    if missing:
        came = ", ".join(host.names[number] for number in sorted(host.guests)) or "nobody"
        found = f"{len(missing)} of {size - 1} others did not come within {seconds:g} s (came: {came})"
        if not all(name.startswith("node") for name in host.names):
            found += f"; missing: ranks {', '.join(map(str, missing))}"
        for guest in host.guests.values():
            with contextlib.suppress(OSError):
                guest.line.send({"refused": found})
        host.close()
        raise MeetingError(
            found, "start the same command on every machine; a firewall must let them reach this port"
        )
    host.begin()
    return host


def _welcome(host: Host, line: _Line, address: str, size: int) -> None:
    """Hear who somebody is, and compare clocks.

    Raises:
        OSError: a stranger, or somebody who is gone again.
    """
    deadline = time.monotonic() + _CONNECT_SECONDS
    said = line.receive(deadline)
    if not isinstance(said, dict) or said.get("greeting") != _GREETING:
        line.close()
        raise ConnectionAbortedError(errno.EPROTO, "a stranger")
    if said["size"] != size:
        line.send({"refused": f"{host.names[0]} waits for {size} members, not {said['size']}"})
        return
    number = said["number"] if said["number"] is not None else len(host.guests) + 1
    if number in host.guests or not 0 < number < size:
        line.send({"refused": f"number {number} is there already, or is none of {size}"})
        return
    asked, before = time.time(), time.perf_counter()
    line.send({"clock": None})
    theirs = line.receive(deadline)["clock"]
    trip = time.perf_counter() - before
    host.names[number] = f"{said['name']} ({address})" if said["number"] is None else said["name"]
    host.guests[number] = _Guest(line)
    host.clocks[number] = Clock(theirs - asked - trip / 2, trip)


def visit(
    address: tuple[str, int], size: int, name: str, seconds: float, *, number: int | None = None
) -> Visitor:
    """Find the host at ``address`` and wait until all have come; ``number`` None: as the host counts.

    Raises:
        MeetingError: the host's name is not known, nobody listens there, nothing comes through, or the host
            says who is missing.
    """
    where = "{}:{}".format(*address)
    deadline = time.monotonic() + seconds
    line = _Line(_connect(address, deadline, seconds))
    greeting = {"greeting": _GREETING, "size": size, "number": number, "name": name}
    try:
        line.send(greeting)
        line.receive(time.monotonic() + _CONNECT_SECONDS)  # asks for the clock
        line.send({"clock": time.time()})
        said = line.receive(deadline + _MARGIN_SECONDS)
        if "refused" not in said:
            quiet = max(seconds, _LEAST_QUIET_SECONDS)
            return Visitor(list(said["members"]), said["number"], line, where, quiet=quiet)
    except (OSError, KeyError, TypeError) as error:
        line.close()
        raise MeetingError(
            f"what answers at {where} is not doctor, or ended: {error}",
            "another program holds that port of the first machine, or doctor ended there: look at its output",
        ) from error
    line.close()
    raise MeetingError(f"the first at {where} says: {said['refused']}", "start the same command everywhere")


def _connect(address: tuple[str, int], deadline: float, seconds: float) -> socket.socket:
    """Try again until it succeeds; a name that is not known and the last failure are told apart."""
    while True:
        limit = max(0.1, min(_CONNECT_SECONDS, deadline - time.monotonic()))
        try:
            return socket.create_connection(address, limit)
        except OSError as error:
            problem = error
        if isinstance(problem, socket.gaierror) or time.monotonic() >= deadline:
            raise _unreachable(address, problem, seconds) from problem
        time.sleep(_AGAIN_SECONDS)


def _unreachable(address: tuple[str, int], error: OSError, seconds: float) -> MeetingError:
    where = "{}:{}".format(*address)
    if isinstance(error, socket.gaierror):
        return MeetingError(
            f"the name {address[0]} is not known here ({error.strerror})",
            "give the address instead of the name, or add it to /etc/hosts of this machine",
        )
    if isinstance(error, ConnectionRefusedError):
        return MeetingError(
            f"nobody listens at {where}, asked for {seconds:g} s",
            "start the same command on the first machine; is this its address and port?",
        )
    if isinstance(error, TimeoutError):
        return MeetingError(
            f"nothing comes back from {where}, asked for {seconds:g} s",
            "a firewall drops what goes to that port, or the address is of another network: open the port",
        )
    return MeetingError(
        f"{where} cannot be reached: {error.strerror}", "is the address right, and is the network up?"
    )


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
def listening(host: str) -> Iterator[int]:
    """A port of this machine at which connections are taken, and closed at once by the kernel's queue."""
    with socket.create_server((host, 0), backlog=1024) as listener:
        yield listener.getsockname()[1]
