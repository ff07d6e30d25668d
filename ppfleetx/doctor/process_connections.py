"""Exchange values between the processes that the doctor examines, over plain sockets.

The first process is the *host*. The other processes, the *guests*, connect to the host. Every wait has a time
limit; when the limit expires, the error names the process that did not answer.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ppfleetx.distributed.rendezvous import (
    Address,
    JsonConnection,
    Member,
    Members,
    RendezvousError,
    receive,
    visit,
)

_LOOK_SECONDS = 1.0
_ROUNDS = 10  # a guest waits this many times as long as the host, so that the host's limit expires first


@dataclass(frozen=True)
class Answer:
    """The value that one process sent in an exchange, or the reason why it sent none."""

    value: Any = None
    problem: str = ""


def connect_processes(
    point: Address, size: int, name: str, seconds: float, *, is_host: bool, number: int | None = None
) -> Host | Guest:
    """Connect this process to the other processes of the job, which has ``size`` processes. The first process
    listens at the address ``point``. Raises RendezvousError if a process does not arrive within ``seconds``,
    or the address cannot be used.

    Args:
        name: the name of this process in messages.
        number: the number of this process in the job; None: processes are numbered as they arrive.
        is_host: whether this is the first process.
    """
    member = Member(name, number)
    if is_host:
        return Host(receive(point, size, member, seconds))
    return Guest(visit(point, size, member, seconds), "{}:{}".format(*point))


@dataclass
class _Seen:
    """What the host knows about one guest.

    Attributes:
        line: the connection to the guest.
        place: the activity that the guest announced last.
        problem: why the guest no longer takes part; "" while it takes part.
        moved: when the guest last sent something, in seconds on the monotonic clock.
    """

    line: JsonConnection
    place: str = "its start"
    problem: str = ""
    moved: float = 0.0


class Host:
    """The first process's connections to all other processes of the job, used to exchange values. ``names``
    are the names of all processes, in the order of their numbers."""

    def __init__(self, members: Members) -> None:
        self.number, self.names = members.number, members.names
        self._guests = {number: _Seen(line) for number, line in members.lines.items()}

    def announce(self, place: str) -> None:
        """Tell the other processes that this process now begins the activity ``place``. If this process then
        stops answering, their error messages name the activity."""
        self._send({"at": place})

    def exchange(self, value: Any, seconds: float) -> list[Answer]:
        """Send ``value`` to all processes, and return one :class:`Answer` for each process, in the order of
        their numbers. All processes must make the same sequence of calls. If no process sends anything for
        ``seconds``, each process whose value is still missing gets an :class:`Answer` with a problem.

        Raises:
            RendezvousError: the host no longer answers. Only the same method of :class:`Guest` raises this.
        """
        begun, answers = time.monotonic(), {0: Answer(value)}
        with selectors.DefaultSelector() as selector:
            for number, guest in self._guests.items():
                if guest.problem:
                    answers[number] = Answer(problem=guest.problem)
                    continue
                guest.moved = begun
                guest.line.connection.setblocking(False)
                selector.register(guest.line.connection, selectors.EVENT_READ, number)
            while selector.get_map():
                for key, _ in selector.select(min(_LOOK_SECONDS, seconds / 4)):
                    answer = self._hear(self._guests[key.data])
                    if answer is not None:
                        answers[key.data] = answer
                        selector.unregister(key.fileobj)
                if time.monotonic() - max(guest.moved for guest in self._guests.values()) > seconds:
                    answers |= self._give_up(seconds, [key.data for key in selector.get_map().values()])
                    break
        ordered = [answers[number] for number in range(len(self.names))]
        self._send({"all": [[answer.value, answer.problem] for answer in ordered]})
        return ordered

    def _give_up(self, seconds: float, numbers: Iterable[int]) -> dict[int, Answer]:
        for guest in (self._guests[number] for number in numbers):
            guest.problem = f"no answer within {seconds:g} s; it was last heard of at: {guest.place}"
        return {number: Answer(problem=self._guests[number].problem) for number in numbers}

    def _hear(self, guest: _Seen) -> Answer | None:
        try:
            guest.line.fill()
            guest.moved = time.monotonic()
            while (message := guest.line.buffered()) is not None:
                if "value" in message:
                    return Answer(message["value"])
                guest.place = str(message.get("at", guest.place))
        except OSError as error:
            guest.problem = f"it ended at: {guest.place} ({error.strerror})"
            return Answer(problem=guest.problem)
        return None

    def _send(self, message: Any) -> None:
        for guest in self._guests.values():
            if not guest.problem:
                with contextlib.suppress(OSError):  # the next exchange reports the lost guest
                    guest.line.send(message)

    def close(self) -> None:
        for guest in self._guests.values():
            guest.line.close()


class Guest:
    """A guest's connection to the host, the first process of the job, used to exchange values. Has the same
    methods and attributes as :class:`Host`."""

    def __init__(self, members: Members, where: str) -> None:
        self.number, self.names = members.number, members.names
        self._line, self._where, self._place = members.lines[0], where, "its start"

    def announce(self, place: str) -> None:
        with contextlib.suppress(OSError):  # exchange() reports that the host is gone
            self._line.send({"at": place})

    def exchange(self, value: Any, seconds: float) -> list[Answer]:
        limit = time.monotonic() + _ROUNDS * seconds
        try:
            self._line.send({"value": value})
            while "all" not in (message := self._line.receive(limit)):
                self._place = str(message.get("at", self._place))
        except OSError as error:
            why = error.strerror or f"no answer within {_ROUNDS * seconds:g} s"
            raise RendezvousError(
                f"{self.names[0]} at {self._where} is gone: {why}; it was last heard of at: {self._place}",
                "look at that machine and its log",
            ) from error
        return [Answer(value, problem) for value, problem in message["all"]]

    def close(self) -> None:
        self._line.close()
