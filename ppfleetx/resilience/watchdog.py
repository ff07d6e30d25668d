"""The watchdog: a thread in each rank that notices when the run makes no progress.

A rank that makes no progress until the timeout writes a report, and then the other ranks write theirs. Each
rank reads all reports and finds the cause. If some rank still makes progress, the job continues. Otherwise,
the cause is printed, and every rank ends with exit code 4 or, if configured to do so, keeps waiting.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppfleetx.resilience.flight_recorder import RECORD, CallRecord
from ppfleetx.resilience.hang_diagnosis import explain, explain_alone
from ppfleetx.resilience.hang_report import Identity, Report, ReportDir, capture_report, latest
from ppfleetx.resilience.progress import EVALUATING, GENERATING, MEETING, PROGRESS, STEPPING, Progress
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.lost_peers import decide_end, is_end_decided
from ppfleetx.utils.machine import WorkMeter, birth_of, killed_for_memory, machine_id, state_of

_GATHERING = 0.25  # fraction of the timeout for which a rank waits for reports of other ranks,
_GATHERING_LEAST, _GATHERING_MOST = 2.0, 20.0  # but at least and at most these seconds
_WORKING_SHARE, _WORKING_BYTES = 0.2, 1 << 20  # least work: fraction of a core, and bytes per second
_COMPUTING = 3.0  # CPU use alone counts as progress for this many timeouts
_SAME_END_SECONDS = 60.0
_ON_DEVICE = (STEPPING, EVALUATING, GENERATING)


@dataclass(frozen=True)
class Limits:
    """The watchdog's settings, from ``Engine.hang_timeout`` and related keys.

    Attributes:
        timeout: seconds without progress after which a rank counts as hung; 0: no watchdog.
        start_timeout: the timeout until the first step is done.
        ends: whether to end the process after a hang, or only to report it.
        counts_work: whether CPU and file activity counts as progress even while the program may be waiting
            for its device.
    """

    timeout: float = 600.0
    start_timeout: float = 300.0
    ends: bool = True
    # False on GPUs, where a thread that waits for the device keeps a core busy.
    counts_work: bool = True


def own_process() -> tuple[str, int, float]:
    """Return (machine, process id, start time) of this process. :func:`remember_peers` needs these from all
    ranks."""
    return machine_id(), os.getpid(), birth_of(os.getpid())


class Watchdog:
    """A thread that watches whether this process makes progress, and that reports and explains a hang. If
    ``limits.ends`` is True, the thread then calls ``end``, which must end the process."""

    def __init__(
        self,
        who: Identity,
        limits: Limits,
        directory: Path,
        *,
        end: Callable[[], None],
        progress: Progress = PROGRESS,
        record: CallRecord = RECORD,
    ) -> None:
        self._who, self._limits, self._end = who, limits, end
        self._progress, self._record = progress, record
        self.processes: dict[int, tuple[str, int, float]] = {}
        self._began = time.time()
        self._seen_until = self._began
        self._killed_before = killed_for_memory()
        self._worked, self._excused = time.monotonic(), 0.0
        self._computes, self._slept_until = False, 0.0
        self._stop = threading.Event()
        self._reports = ReportDir(directory)
        self._work = WorkMeter(self._own_cpu_seconds)
        self._tick = min(1.0, min(t for t in (limits.timeout, limits.start_timeout) if t) / 10)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    # -- watching ------------------------------------------------------------------------------

    @property
    def _timeout(self) -> float:
        limits = self._limits
        return limits.timeout if self._progress.is_past_start else limits.start_timeout

    def _quiet_seconds(self) -> float:
        """Return the seconds since this rank last made progress; 0 during the rendezvous at the start. Unlike
        in :meth:`_seconds_without_record`, CPU and file activity can count as progress."""
        if self._progress.place == MEETING:
            return 0.0
        latest = max(time.monotonic() - self._seconds_without_record(), self._excused)
        if self._seconds_without_record() < self._longest_computing:
            latest = max(latest, self._worked)
        return time.monotonic() - latest

    def _seconds_without_record(self) -> float:
        """Return the seconds since the program last recorded progress, or began or ended a collective, send
        or receive. The time in which the process was suspended does not count."""
        heard = max(self._progress.since, self._record.last_activity, self._slept_until)
        return time.monotonic() - heard

    @property
    def _longest_computing(self) -> float:
        """The number of seconds for which CPU use alone counts as progress."""
        limits = self._limits
        # There is no limit at the start, which can take long, and none for a single process, for which no
        # other rank waits.
        if not self._progress.is_past_start or self._who.world_size == 1:
            return math.inf
        return _COMPUTING * limits.timeout

    def _notice_sleep(self, seconds: float) -> None:
        """Exclude the time in which the process was suspended from the time without progress. ``seconds`` is
        the duration of the watchdog's last sleep. If it is much longer than intended, the process was
        suspended."""
        late = seconds - self._tick
        if late > max(1.0, self._tick):
            now, silence, quiet = time.monotonic(), self._seconds_without_record(), self._quiet_seconds()
            self._slept_until = now - max(silence - late, 0.0)
            self._excused = max(self._excused, now - max(quiet - late, 0.0))
        if late > self._seconds_for_reports:
            self._seen_until = time.time()  # the other ranks have decided without this rank

    def _watch(self) -> None:
        news_at = time.monotonic()
        while True:
            asleep_at = time.monotonic()
            if self._stop.wait(self._tick):
                return
            self._notice_sleep(time.monotonic() - asleep_at)
            works = self._look_at_work()
            timeout = self._timeout
            if not timeout:
                continue
            due = self._quiet_seconds() >= timeout
            if not due and time.monotonic() - news_at >= max(self._tick, timeout / 60):
                news_at = time.monotonic()
                due = self._reports.has_news(self._seen_until)
            if due:
                self._inquire(works)

    def _own_cpu_seconds(self) -> float:
        own = 0.0 if threading.current_thread() is not getattr(self, "_thread", None) else time.thread_time()
        return own + self._reports.seconds

    def _look_at_work(self) -> bool:
        self._computes, moves = self._work.look(share=_WORKING_SHARE, size=_WORKING_BYTES)
        if not self._limits.counts_work and (self._record.reads or self._progress.place in _ON_DEVICE):
            self._computes = moves = False
        works = moves or (self._computes and self._seconds_without_record() < self._longest_computing)
        if works:
            self._worked = time.monotonic()
        return works

    # -- without progress ------------------------------------------------------------------------

    def _inquire(self, works: bool) -> None:
        asked = self._seen_until
        report = self._report(quiet=self._quiet_seconds(), works=works, computes=self._computes)
        is_written = self._reports.write(report, readable(report))
        reports = self._gather(report, asked)
        explanation = explain(reports) if is_written or report.world_size == 1 else explain_alone(report)
        self._seen_until = time.time()
        if explanation.goes_on:
            self._excused = time.monotonic()
            quiet = [rank for rank in reports if rank not in explanation.goes_on]
            if quiet and report.rank == min(quiet):
                get_logger().warning(f"{_since(reports)}: {explanation.sentence}; the job waits for this")
            return
        if self._limits.ends:
            decide_end()
            # Wait until the other ranks have decided too; otherwise the end of this process would look like
            # the cause.
            written = max(one.written for one in reports.values())
            last = written + self._seconds_for_reports + 2 * self._tick
            time.sleep(min(max(last - time.time(), 0.0), _GATHERING_MOST))
        if report.rank == min(reports):
            place = f"the ranks' reports are in {self._reports.directory}"
            where = place if is_written else "no report could be written"
            said = f"error: {_since(reports)}: {explanation.sentence}; {where}"
            print(said, file=sys.stderr, flush=True)
            self._reports.write_summary(explanation.sentence)
        elif self._limits.ends:
            time.sleep(self._tick)  # the rank that prints the explanation must finish first
        if self._limits.ends:
            self._end()
        self._excused = time.monotonic()

    def _report(self, **facts: Any) -> Report:
        """Return this rank's hang report, with the state of the other ranks on this machine and the number of
        processes that were killed for lack of memory. ``facts`` are further arguments of
        :func:`capture_report`."""
        report = capture_report(self._who, self._progress, self._record, timeout=self._timeout, **facts)
        killed, here = killed_for_memory() - self._killed_before, machine_id()
        states = {
            rank: state_of(pid, born)
            for rank, (place, pid, born) in self.processes.items()
            if rank != self._who.rank and place == here and place
        }
        return replace(report, peers=states, killed_for_memory=killed)

    def report_failure(self, error: Exception, *, lost: bool, at_end: bool) -> None:
        """Write a hang report for a rank that ends because of an error. Does nothing if the job has only one
        rank, or if a thread has already decided to end this process.

        Args:
            lost: whether the error only says that another rank has ended.
            at_end: whether to write the report only when the process exits.
        """
        if self._who.world_size == 1 or is_end_decided():
            return
        self._reports.open()
        # With `at_end`, the error is printed first, so it is not lost if a launcher kills the process
        # meanwhile.
        if at_end:
            atexit.register(self._write_failure, error, lost)
        else:
            self._write_failure(error, lost)

    def _write_failure(self, error: Exception, lost: bool) -> None:
        earlier = self._reports.reports(time.time() - _SAME_END_SECONDS)
        if lost and any(report.asks for report in earlier.values()):
            return  # a consequence: the other ranks ended because of a hang
        report = self._report(quiet=0.0, works=False, failed=error, lost=lost)
        if self._reports.write(report, readable(report)):
            found = latest(self._reports.reports(self._began))
            self._reports.write_summary(explain(found).sentence)

    def _gather(self, own: Report, since: float) -> dict[int, Report]:
        deadline = time.monotonic() + self._seconds_for_reports
        while True:
            found = self._reports.reports(since)
            reports = {rank: one for rank, one in found.items() if one.world_size == own.world_size}
            reports[own.rank] = own
            if len(reports) == own.world_size or time.monotonic() >= deadline:
                return reports
            time.sleep(self._tick / 2)

    @property
    def _seconds_for_reports(self) -> float:
        return min(max(_GATHERING * self._timeout, _GATHERING_LEAST), _GATHERING_MOST) + 2 * self._tick


def _since(reports: Mapping[int, Report]) -> str:
    return f"no progress for {max(report.quiet_seconds for report in reports.values()):.0f} s"


def readable(report: Report) -> str:
    """Format a hang report for the user."""
    lines = [
        f"rank {report.rank} of {report.world_size}, process {report.pid} on {report.host}",
        f"step {report.step}, {report.place} for {report.place_seconds:.1f} s, no progress for "
        f"{report.quiet_seconds:.1f} s; main thread at {report.where}",
        f"waits for: {report.waits_for or 'no other rank'}",
        "memory: " + ", ".join(f"{name} {size / 2**20:.0f} MB" for name, size in report.memory.items()),
        "",
        f"the last {len(report.calls)} collectives and messages, newest first:",
        *(
            f"  {call.seconds_ago:10.3f} s ago  {call.state:12} {call}  {list(call.shape or ())} {call.dtype}"
            for call in reversed(report.calls)
        ),
    ]
    for thread, stack in report.stacks.items():
        lines += ["", f"thread {thread}, outermost call first:", *(f"  {line}" for line in stack)]
    return "\n".join(lines) + "\n"


_current: Watchdog | None = None


def current() -> Watchdog | None:
    return _current


def begin(who: Identity, limits: Limits, directory: Path, *, end: Callable[[], None]) -> Watchdog | None:
    """Start the watchdog of this process and return it. An earlier watchdog of the process is stopped first.
    Returns None, and starts no watchdog, if ``limits.timeout`` is 0."""
    global _current
    finish()
    PROGRESS.begin()
    if limits.timeout:
        _current = Watchdog(who, limits, directory, end=end)
        _current.start()
    return _current


def finish() -> None:
    global _current
    if _current is not None:
        _current.stop()
        _current = None


def remember_peers(processes: Mapping[int, Any]) -> None:
    """Tell the watchdog which process each rank is, so that hang reports can say why a rank does not respond.
    ``processes`` maps each rank to its result of :func:`own_process`."""
    if _current is not None:
        _current.processes = {rank: tuple(one) for rank, one in processes.items()}
