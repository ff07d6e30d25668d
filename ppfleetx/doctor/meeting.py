"""Exchange values between processes over plain sockets, before any communication library is trusted.

The first process is the host, the others are its guests. Every wait has a time limit, and its error names the
process that did not answer and what it was last doing. A thread in each process sends heartbeats, so that a
stopped process can be told from a slow one.
"""

from __future__ import annotations

import contextlib
import selectors
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from ppfleetx.distributed.rendezvous import (
    MARGIN_SECONDS,
    Address,
    Line,
    Member,
    Members,
    RendezvousError,
    receive,
    visit,
)

PULSE_SECONDS = 1.0
LEAST_QUIET_SECONDS = 60.0
"""The shortest silence that counts: no heartbeat is sent while a large library is being loaded."""
_ROUNDS = 10  # the host decides when to give up, so a guest waits this many times as long


@dataclass(frozen=True)
class Answer:
    """The result of a round for one member: its value, or why there is none."""

    value: Any = None
    problem: str = ""


class Meeting(Protocol):
    """A member's end of the connections.

    Attributes:
        number: number of this member; the host is 0.
        names: names of all members, by number.
    """

    number: int
    names: list[str]

    def tell(self, place: str) -> None:
        """Tell the host what this member is doing now, to be reported if it stops answering."""

    def exchange(self, value: Any, seconds: float, quiet: float | None = None) -> list[Answer]:
        """Exchange values: returns those of all members by number. All members must call this in the same
        order.

        Args:
            value: this member's value.
            seconds: how long to wait while no member makes progress; each value and each :meth:`tell` is
                progress.
            quiet: how long a member may be silent, without even a heartbeat; None: as long as the members
                waited for each other at the start, but at least a minute.

        Raises:
            RendezvousError: the host is gone.
        """

    def close(self) -> None:
        """Leave the meeting."""


def open_meeting(
    point: Address, size: int, name: str, seconds: float, *, is_host: bool, number: int | None = None
) -> Meeting:
    """Meet the other members at ``point``.

    Args:
        size: number of members, including this one.
        number: number of this member; None: members are numbered in the order they arrive.
        seconds: how long to wait for the others.

    Raises:
        RendezvousError: a member does not arrive, or the address cannot be used.
    """
    quiet, member = max(seconds, LEAST_QUIET_SECONDS), Member(name, number)
    if is_host:
        return _Host(receive(point, size, member, seconds), quiet)
    return _Guest(visit(point, size, member, seconds), quiet, "{}:{}".format(*point))


class _Pulse:
    """A thread that sends heartbeats over some connections, whatever the main thread is doing."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._lines, self._over = list(lines), threading.Event()
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def _beat(self) -> None:
        while not self._over.wait(PULSE_SECONDS):
            for line in self._lines:
                with contextlib.suppress(OSError):  # exchange() reports a lost connection
                    line.send({"alive": True})

    def stop(self) -> None:
        self._over.set()


def _least(quiet: float, seconds: float) -> float:
    """Limit ``quiet`` to one whole wait, but allow at least three heartbeats."""
    return max(min(quiet, seconds), 3 * PULSE_SECONDS)


def _silence(seconds: float, place: str) -> str:
    return (
        f"nothing was heard of it for {seconds:g} s: its process is stopped, or its machine does not answer; "
        f"it was last heard of at: {place}"
    )


@dataclass
class _Seen:
    """What the host knows about a guest: its last activity, and when it was last heard and last made
    progress."""

    line: Line
    place: str = "its start"
    problem: str = ""
    heard: float = 0.0
    moved: float = 0.0


class _Host:
    def __init__(self, members: Members, quiet: float) -> None:
        self.number, self.names, self._quiet = members.number, members.names, quiet
        self._guests = {number: _Seen(line) for number, line in members.lines.items()}
        self._pulse = _Pulse(members.lines.values())

    def tell(self, place: str) -> None:
        self._send({"at": place})

    def exchange(self, value: Any, seconds: float, quiet: float | None = None) -> list[Answer]:
        quiet, begun = _least(quiet or self._quiet, seconds), time.monotonic()
        answers = {0: Answer(value)}
        with selectors.DefaultSelector() as selector:
            for number, guest in self._guests.items():
                if guest.problem:
                    answers[number] = Answer(problem=guest.problem)
                    continue
                guest.heard = guest.moved = begun
                guest.line.connection.setblocking(False)
                selector.register(guest.line.connection, selectors.EVENT_READ, number)
            while selector.get_map():
                self._give_up(seconds, quiet, answers, selector)
                for key, _ in selector.select(min(PULSE_SECONDS, quiet / 4)):
                    answer = self._hear(self._guests[key.data])
                    if answer is not None:
                        answers[key.data] = answer
                        selector.unregister(key.fileobj)
        ordered = [answers[number] for number in range(len(self.names))]
        self._send({"all": [[answer.value, answer.problem] for answer in ordered]})
        return ordered

    def _give_up(
        self, seconds: float, quiet: float, answers: dict[int, Answer], selector: selectors.BaseSelector
    ) -> None:
        """Stop waiting for silent guests; if no guest makes progress, stop waiting for all of them."""
        now = time.monotonic()
        last = max(guest.moved for guest in self._guests.values())
        for number in [number for number in self._guests if number not in answers]:
            guest = self._guests[number]
            if now - guest.heard > quiet:
                guest.problem = _silence(quiet, guest.place)
            elif now - last > seconds:
                guest.problem = f"no answer within {seconds:g} s; it was last heard of at: {guest.place}"
            else:
                continue
            answers[number] = Answer(problem=guest.problem)
            selector.unregister(guest.line.connection)

    def _hear(self, guest: _Seen) -> Answer | None:
        try:
            guest.line.fill()
            guest.heard = time.monotonic()
            while (message := guest.line.buffered()) is not None:
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
        for guest in self._guests.values():
            if not guest.problem:
                with contextlib.suppress(OSError):  # the next round reports it
                    guest.line.send(message)

    def close(self) -> None:
        self._pulse.stop()
        for guest in self._guests.values():
            guest.line.close()


class _Guest:
    def __init__(self, members: Members, quiet: float, where: str) -> None:
        self.number, self.names = members.number, members.names
        self._line, self._quiet, self._where = members.lines[0], quiet, where
        self._place = "its start"
        self._pulse = _Pulse([self._line])

    def tell(self, place: str) -> None:
        with contextlib.suppress(OSError):  # exchange() reports that the host is gone
            self._line.send({"at": place})
            self._line.connection.settimeout(0.0)
            with contextlib.suppress(BlockingIOError):
                self._line.fill()
            while (message := self._line.buffered()) is not None:
                self._place = str(message.get("at", self._place))

    def exchange(self, value: Any, seconds: float, quiet: float | None = None) -> list[Answer]:
        try:
            return self._exchange(value, seconds, _least(quiet or self._quiet, seconds))
        except OSError as error:
            why = error.strerror or "no answer in time"
            raise self._gone(f"{why}; it was last heard of at: {self._place}") from error

    def _exchange(self, value: Any, seconds: float, quiet: float) -> list[Answer]:
        self._line.send({"value": value})
        limit = time.monotonic() + _ROUNDS * seconds
        while True:
            silent = time.monotonic() + quiet + MARGIN_SECONDS
            try:
                message = self._line.receive(min(silent, limit))
            except TimeoutError:
                if silent < limit:
                    raise self._gone(_silence(quiet + MARGIN_SECONDS, self._place)) from None
                raise
            if "all" in message:
                return [Answer(value, problem) for value, problem in message["all"]]
            self._place = str(message.get("at", self._place))

    def _gone(self, why: str) -> RendezvousError:
        return RendezvousError(
            f"{self.names[0]} at {self._where} is gone: {why}", "look at that machine and its log"
        )

    def close(self) -> None:
        self._pulse.stop()
        self._line.close()
