"""Directories for the ranks' reports. Every access has a time limit: the disk may be what hangs."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ppfleetx.resilience.hang_report import Report, read_reports

HANG_DIRS = ("hang", "hang_evaluation", "hang_generation")
"""Directories under an output directory for training, evaluation and generation."""
PATIENCE_SECONDS = 5.0
PRIVATE = 0o700
_SUMMARY = "summary.txt"


class ReportDir:
    """One directory, created with ``mode``.

    Accesses run in a separate thread, which may block for ever. After an access that does not return in time,
    the directory is not used any more.

    Attributes:
        seconds: CPU time of its thread.
    """

    def __init__(self, directory: Path, mode: int = 0o777) -> None:
        self.directory, self._mode = directory, mode
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_dead, self._is_started = False, False
        self.seconds = 0.0

    def open(self) -> None:
        """Start the thread, before the process is ending, when Python starts no more threads."""
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._serve, name="hang-reports", daemon=True).start()

    def has_news(self, since: float) -> bool:
        """Whether a rank without progress has written a report after ``since`` (seconds since 1970), by which
        it asks the other ranks for theirs."""

        def look() -> bool:
            with contextlib.suppress(OSError):
                if self._is_foreign():
                    return False
                if any(path.stat().st_mtime > since for path in self.directory.glob("rank_*.json")):
                    return any(report.asks for report in read_reports(self.directory, since=since).values())
            return False

        return bool(self._do(look))

    def write(self, report: Report, text: str) -> bool:
        """Write this rank's report as JSON and as ``text``; returns whether that worked."""

        def write_both() -> bool:
            try:
                self.directory.mkdir(mode=self._mode, parents=True, exist_ok=True)
                if self._is_foreign():
                    return False
                base = self.directory / f"rank_{report.rank:05d}"
                _write_whole(base.with_suffix(".json"), report.to_json())
                with contextlib.suppress(OSError):  # a full disk may have room for only one of them
                    _write_whole(base.with_suffix(".txt"), text)
            except OSError:
                return False
            return True

        return bool(self._do(write_both))

    def reports(self, since: float) -> dict[int, Report]:
        """The reports written after ``since``."""

        def read() -> dict[int, Report]:
            with contextlib.suppress(OSError):
                if not self._is_foreign():
                    return read_reports(self.directory, since=since)
            return {}

        return self._do(read) or {}

    def clear(self, rank: int | None = None) -> None:
        """Delete the reports of ``rank``; None: of the whole job."""
        if not self._is_started:
            return

        def remove() -> None:
            with contextlib.suppress(OSError):
                if self._is_foreign():
                    return
                for path in self.directory.glob("rank_*" if rank is None else f"rank_{rank:05d}.*"):
                    path.unlink(missing_ok=True)
                if not any(self.directory.glob("rank_*")):
                    (self.directory / _SUMMARY).unlink(missing_ok=True)
                self.directory.rmdir()  # fails until all ranks have done this

        self._do(remove)

    def write_summary(self, sentence: str) -> None:
        """Write the explanation beside the reports."""

        def write() -> None:
            with contextlib.suppress(OSError):
                if self._is_foreign():
                    return
                (self.directory / _SUMMARY).write_text(f"{sentence}\n", encoding="utf-8")

        self._do(write)

    def _is_foreign(self) -> bool:
        """Whether another user has created the directory, or a link of its name, in a shared place.

        Raises:
            OSError: it does not exist.
        """
        return self._mode == PRIVATE and self.directory.lstat().st_uid != os.getuid()

    def _do(self, act: Callable[[], object]) -> object:
        """Call ``act`` in this directory's thread; returns None if it does not finish in time."""
        if self._is_dead:
            return None
        self.open()
        answer: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._work.put(lambda: answer.put(act()))
        try:
            return answer.get(timeout=PATIENCE_SECONDS)
        except queue.Empty:
            self._is_dead = True
            return None

    def _serve(self) -> None:
        while True:
            self._work.get()()
            self.seconds = time.thread_time()


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that readers see all of it or nothing."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
