"""Record the program's progress, for the watchdog."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Progress:
    """Activity and time of the last progress, written by the program and read by another thread.

    Attributes:
        place: current activity of the program, e.g. "reading data".
        step: optimizer step; None before the first.
        since: time of the last progress, in seconds of the monotonic clock.
        is_under_way: whether a step has been done, so that later steps should take about as long.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.place, self.step, self.is_under_way = "starting", None, False
        self.since = time.monotonic()

    def beat(self, place: str, step: int | None = None) -> None:
        """Record that the program now does ``place``, and ``step`` if it is a new step."""
        self.place, self.since = place, time.monotonic()
        if step is not None:
            self.step = step

    def go_on(self) -> None:
        self.since = time.monotonic()

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Context manager: the program does ``place`` inside, and the previous activity afterwards."""
        before = self.place
        self.beat(place)
        try:
            yield
        finally:
            self.beat(before)


PROGRESS = Progress()
"""The progress of this process."""

MEETING = "meeting the other ranks"
READING, STEPPING = "reading data", "in its step"
EVALUATING, GENERATING = "evaluating", "generating"
SAVING, RESTING = "saving a checkpoint", "between two steps"
