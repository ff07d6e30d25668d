"""The directory to which the ranks write their hang reports. Every access has a time limit, because a broken
disk may be why the job hangs."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ppfleetx.resilience.hang_report import Report, read_reports
from ppfleetx.utils.output_files import atomic_write

HANG_DIRS = ("hang", "hang_evaluation", "hang_generation")
"""Subdirectories of an output directory for training, evaluation and generation."""
PATIENCE_SECONDS = 5.0
_SUMMARY = "summary.txt"

Result = TypeVar("Result")


class ReportDir:
    """A directory of hang reports. It is created when the first report is written. After an access that takes
    longer than :data:`PATIENCE_SECONDS`, all further accesses are skipped."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_dead, self._is_started = False, False
        self.seconds = 0.0

    def open(self) -> None:
        """Start the thread that accesses the directory of hang reports. Call it early: at exit, Python starts
        no threads."""
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._serve, name="hang-reports", daemon=True).start()

    def has_news(self, since: float) -> bool:
        """Return whether a report has been written after ``since`` (seconds since 1970) by a rank that makes
        no progress. Such a report asks all other ranks to write theirs."""

        def look() -> bool:
            if any(path.stat().st_mtime > since for path in self.directory.glob("rank_*.json")):
                return any(report.asks for report in read_reports(self.directory, since=since).values())
            return False

        return bool(self._do_in_thread(look))

    def write(self, report: Report, text: str) -> bool:
        """Write this rank's report to the directory, as JSON for other ranks and as ``text`` for the user.
        Returns whether the JSON file was written. The text file can be missing even if it was."""

        def write_both() -> bool:
            self.directory.mkdir(parents=True, exist_ok=True)
            base = self.directory / f"rank_{report.rank:05d}"
            # A disk that hangs may still take a file, but not flush it.
            with atomic_write(base.with_suffix(".json"), "w", flush=False) as file:
                file.write(report.to_json())
            # A full disk may have room for only one file.
            with (
                contextlib.suppress(OSError),
                atomic_write(base.with_suffix(".txt"), "w", flush=False) as file,
            ):
                file.write(text)
            return True

        return bool(self._do_in_thread(write_both))

    def reports(self, since: float) -> dict[int, Report]:
        return self._do_in_thread(lambda: read_reports(self.directory, since=since)) or {}

    def write_summary(self, sentence: str) -> None:
        self._do_in_thread(lambda: (self.directory / _SUMMARY).write_text(f"{sentence}\n", encoding="utf-8"))

    def _do_in_thread(self, act: Callable[[], Result]) -> Result | None:
        """Call ``act`` in the thread that accesses the directory of hang reports, and return its result; None
        if it fails or takes too long."""
        if self._is_dead:
            return None
        self.open()
        answer: queue.SimpleQueue[Result | None] = queue.SimpleQueue()

        def guarded() -> Result | None:
            with contextlib.suppress(OSError):
                return act()
            return None

        # `act` runs in the directory's own thread, because a broken disk can block the call forever.
        self._work.put(lambda: answer.put(guarded()))
        try:
            return answer.get(timeout=PATIENCE_SECONDS)
        except queue.Empty:
            self._is_dead = True
            return None

    def _serve(self) -> None:
        while True:
            self._work.get()()
            self.seconds = time.thread_time()
