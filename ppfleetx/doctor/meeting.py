"""Processes that meet over plain sockets before they trust anything else, and exchange values.

One of them is the host and listens, the others are its guests. Every wait ends within a known time, and then
says who did not answer and what it was doing when it was last heard of. While members work, a thread of each
says that its process runs; so one that is stopped is told from one that is slow.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from ppfleetx.doctor.line import PULSE_SECONDS, Line, Pulse, silence, silence_limit

MARGIN_SECONDS = 10.0
"""That guests wait longer than the host, which says who is missing."""
LEAST_QUIET_SECONDS = 60.0
"""What loads a large library lets no other thread of its process run."""
_WAITING = "waiting for the others"


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


@dataclass
class Guest:
    """A member, seen by the host."""

    line: Line
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
    guests: dict[int, Guest] = field(default_factory=dict)
    quiet: float = LEAST_QUIET_SECONDS
    _pulse: Pulse | None = None

    def begin(self) -> None:
        """All have come."""
        for number, guest in self.guests.items():
            guest.line.send({"members": self.names, "number": number})
        self._pulse = Pulse(guest.line for guest in self.guests.values())

    def tell(self, place: str) -> None:
        self._send({"at": place})

    def exchange(self, value: Any, seconds: float, quiet: float | None = None) -> list[Answer]:
        quiet, begun = silence_limit(quiet or self.quiet, seconds), time.monotonic()
        answers, told = {0: Answer(value)}, 0.0
        with selectors.DefaultSelector() as selector:
            for number, guest in self.guests.items():
                if guest.problem:
                    answers[number] = Answer(problem=guest.problem)
                    continue
                guest.heard = guest.moved = begun
                guest.line.connection.setblocking(False)
                selector.register(guest.line.connection, selectors.EVENT_READ, number)
            while selector.get_map():
                told = self._relay(told)
                self._give_up(seconds, quiet, answers, selector)
                for key, _ in selector.select(min(PULSE_SECONDS, quiet / 4)):
                    answer = self._hear(self.guests[key.data])
                    if answer is not None:
                        answers[key.data] = answer
                        selector.unregister(key.fileobj)
        ordered = [answers[number] for number in range(len(self.names))]
        self._send({"all": [[answer.value, answer.problem] for answer in ordered]})
        return ordered

    def _relay(self, told: float) -> float:
        """Let guests who have answered wait on while others get further; the time they know of.

        Args:
            told: what this gave before.
        """
        now = time.monotonic()
        if now - told < PULSE_SECONDS or max(guest.moved for guest in self.guests.values()) <= told:
            return told
        self.tell(_WAITING)
        return now

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
                guest.problem = silence(quiet, guest.place)
            elif now - last > seconds:
                guest.problem = f"no answer within {seconds:g} s; it was last heard of at: {guest.place}"
            else:
                continue
            answers[number] = Answer(problem=guest.problem)
            selector.unregister(guest.line.connection)

    def _hear(self, guest: Guest) -> Answer | None:
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
    line: Line
    where: str
    clocks: dict[int, Clock] = field(default_factory=dict)
    place: str = "its start"
    quiet: float = LEAST_QUIET_SECONDS

    def __post_init__(self) -> None:
        self._pulse = Pulse([self.line])

    def tell(self, place: str) -> None:
        with contextlib.suppress(OSError):  # exchange says that the host is gone
            self.line.send({"at": place})
            for said in self.line.come():
                self.place = str(said.get("at", self.place))

    def exchange(self, value: Any, seconds: float, quiet: float | None = None) -> list[Answer]:
        quiet, moved = silence_limit(quiet or self.quiet, seconds), time.monotonic()
        why = ""
        try:
            self.line.send({"value": value})
            while True:
                heard = time.monotonic()
                end = min(heard + quiet, moved + seconds)
                if (said := self._hear(end + MARGIN_SECONDS)) is None:
                    if end == heard + quiet:
                        why = silence(quiet + MARGIN_SECONDS, self.place)
                    break
                if "all" in said:
                    return [Answer(value, problem) for value, problem in said["all"]]
                if "at" in said:
                    self.place, moved = str(said["at"]), time.monotonic()
            problem = f"no answer within {seconds + MARGIN_SECONDS:g} s"
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
