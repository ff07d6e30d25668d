"""What the program says it is doing; the watchdog reads it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Progress:
    """Place and time of the last progress. The program writes it, another thread reads it.

    Attributes:
        place: what the program is doing, e.g. "reading data".
        step: the optimizer step; None before the first.
        since: time of the last sign, in seconds of the monotonic clock.
        is_under_way: a step has been done, so later ones should take about as long.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A run begins."""
        self.place, self.step, self.is_under_way = "starting", None, False
        self.since = time.monotonic()

    def beat(self, place: str, step: int | None = None) -> None:
        """The program is now at ``place``; ``step`` if it is a new one."""
        self.place, self.since = place, time.monotonic()
        if step is not None:
            self.step = step

    def go_on(self) -> None:
        """The program has made progress at the same place."""
        self.since = time.monotonic()

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Within the block the program is at ``place``; afterwards at the place before."""
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
