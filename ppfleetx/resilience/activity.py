"""What this process does at the moment, as its program says; read by the watchdog."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Progress:
    """Place and time of the last progress. Written by the program, read by another thread.

    Attributes:
        place: what the program does, for people: "reading data".
        step: the optimizer step it is in; None before the first.
        since: when it was last heard of, in seconds of the monotonic clock.
        is_under_way: a step has been done: later ones should take about as long.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A run begins."""
        self.place, self.step, self.is_under_way = "starting", None, False
        self.since = time.monotonic()

    def beat(self, place: str, step: int | None = None) -> None:
        """The program goes on with ``place``, in ``step`` unless that stays."""
        self.place, self.since = place, time.monotonic()
        if step is not None:
            self.step = step

    def go_on(self) -> None:
        """The program has come further where it is."""
        self.since = time.monotonic()

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Within, the program is at ``place``; afterwards where it was."""
        before = self.place
        self.beat(place)
        try:
            yield
        finally:
            self.beat(before)


PROGRESS = Progress()
"""Of this process."""

MEETING = "meeting the other ranks"
READING, STEPPING = "reading data", "in its step"
EVALUATING, GENERATING = "evaluating", "generating"
SAVING, RESTING = "saving a checkpoint", "between two steps"
