"""The current activity of this process and the time of its last progress. The program records them, and the
watchdog reads them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Progress:
    """What the program is doing, and when it last made progress.

    Attributes:
        place: the activity, such as "reading data".
        step: optimizer step; None before the first.
        since: time of the last progress (``time.monotonic``).
        is_past_start: whether the start is over. The watchdog has a separate time limit for the start.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.place, self.step, self.is_past_start = "starting", None, False
        self.since = time.monotonic()

    def beat(self, place: str, step: int | None = None) -> None:
        """Record progress: the program begins an activity, described by ``place``. ``step`` is the optimizer
        step; None keeps the step recorded before."""
        self.place, self.since = place, time.monotonic()
        if step is not None:
            self.step = step

    def go_on(self) -> None:
        self.since = time.monotonic()

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Context manager that makes ``place`` the program's activity inside the block, and then restores the
        previous activity. Both changes count as progress. After an exception, ``place`` stays, because
        reports of the error name the activity in which the error was raised."""
        before = self.place
        self.beat(place)
        yield
        self.beat(before)


PROGRESS = Progress()
"""The progress of this process."""

MEETING = "meeting the other ranks"
READING, STEPPING = "reading data", "in its step"
EVALUATING, GENERATING = "evaluating", "generating"
SAVING, RESTING = "saving a checkpoint", "between two steps"
