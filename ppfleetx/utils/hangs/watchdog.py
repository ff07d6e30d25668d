"""A thread per rank that notices when the run does not go on, and has all ranks say why.

1. A rank that has made no progress for the time-out lays down its report (``report.py``).
2. The others see it, and lay down theirs, whatever they are doing.
3. Each reads what is there after a short wait (a frozen rank writes nothing) and joins it
   (``explain.py``). When a rank still works, the job is slow, not hung, and is waited for. Otherwise the
   sentence is printed and every rank ends with exit code 4, or goes on waiting, as configured.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ppfleetx.utils.hangs.explain import Explanation, explain
from ppfleetx.utils.hangs.kernel import Activity, birth_of, killed_for_memory, machine, state_of
from ppfleetx.utils.hangs.progress import EVALUATING, GENERATING, MEETING, PROGRESS, STEPPING, Progress
from ppfleetx.utils.hangs.record import RECORD, CallRecord
from ppfleetx.utils.hangs.report import Identity, Report, take
from ppfleetx.utils.hangs.shelf import PRIVATE, Shelf
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.peers import decide_end

_GATHERING = 0.25  # of the time-out: so long the others' reports are waited for,
_GATHERING_MOST = 20.0  # but no longer than this
_WORKING_SHARE, _WORKING_BYTES = 0.2, 1 << 20  # of a core; a second
_ON_DEVICE = (STEPPING, EVALUATING, GENERATING)


@dataclass(frozen=True)
class Limits:
    """``Engine.hang_timeout`` and its relatives.

    Attributes:
        timeout: seconds without progress, 0 for none.
        start_timeout: the same before the first step is done.
        ends: end the process; otherwise only report.
        counts_work: computing is progress in a step too, and where the program waits for its device. On a
            card it is not: a thread that waits for one spins.
    """

    timeout: float = 600.0
    start_timeout: float = 300.0
    ends: bool = True
    counts_work: bool = True


@dataclass
class Peers:
    """Where the job's processes are: gathered once, when all run.

    Attributes:
        processes: of each rank machine, process id, and when it began.
    """

    processes: dict[int, tuple[str, int, float]] = field(default_factory=dict)

    @staticmethod
    def own() -> tuple[str, int, float]:
        """This process's entry."""
        return machine(), os.getpid(), birth_of(os.getpid())

    def states(self, own: int) -> dict[int, str]:
        """What the kernel says of those on this machine."""
        here = machine()
        return {
            rank: state_of(pid, born)
            for rank, (place, pid, born) in self.processes.items()
            if rank != own and place == here and place
        }


class Watchdog:
    """Watches this process.

    Args:
        who: this rank.
        limits: how long to wait, and what then.
        directory: where the reports go.
        end: ends the process; called in the watchdog's thread.
    """

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
        self.peers = Peers()
        self._began = time.time()
        self._seen_until = self._began
        self._killed_before = killed_for_memory()
        self._activity, self._worked, self._excused = Activity(), time.monotonic(), 0.0
        self._stop = threading.Event()
        self.directory = directory
        self._shelves = [Shelf(directory)]
        if who.world_size > 1 or not directory.exists():
            self._shelves.append(Shelf(_beside(directory), PRIVATE))
        self._tick = min(1.0, min(t for t in (limits.timeout, limits.start_timeout) if t) / 10)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """The run is over."""
        self._stop.set()
        for shelf in self._shelves[1:]:
            shelf.clear(self._who.rank)

    # -- watching ------------------------------------------------------------------------------

    @property
    def _timeout(self) -> float:
        limits = self._limits
        return limits.timeout if self._progress.is_under_way else limits.start_timeout

    def _quiet(self) -> float:
        """Seconds since the last progress. Ranks that meet have a limit of their own, and say who is late."""
        if self._progress.place == MEETING:
            return 0.0
        latest = max(self._progress.since, self._record.last_activity, self._worked, self._excused)
        return time.monotonic() - latest

    def _watch(self) -> None:
        news_at = time.monotonic()
        while not self._stop.wait(self._tick):
            works = self._look_at_work()
            timeout = self._timeout
            if not timeout:
                continue
            due = self._quiet() >= timeout
            if not due and time.monotonic() - news_at >= max(self._tick, timeout / 60):
                news_at = time.monotonic()
                due = any(shelf.has_news(self._seen_until) for shelf in self._shelves)
            if due:
                self._inquire(timeout, works)

    def _look_at_work(self) -> bool:
        works = self._activity.works(share=_WORKING_SHARE, size=_WORKING_BYTES)
        if not self._limits.counts_work and (self._record.reads or self._progress.place in _ON_DEVICE):
            works = False
        if works:
            self._worked = time.monotonic()
        return works

    # -- when it does not go on ------------------------------------------------------------------

    def _inquire(self, timeout: float, works: bool) -> None:
        """Report, hear the others, and decide."""
        asked = self._seen_until
        report = self._report(timeout, works)
        text = readable(report)
        laid = [shelf.directory for shelf in self._shelves if shelf.lay(report, text)]
        reports = self._gather(report, asked, timeout)
        explanation = explain(reports)
        self._seen_until = time.time()
        if explanation.goes_on:
            self._excused = time.monotonic()
            quiet = [rank for rank in reports if rank not in explanation.goes_on]
            if quiet and report.rank == min(quiet):
                get_logger().warning(f"{_since(reports)}: {explanation.sentence}; this is waited for")
            return
        if self._limits.ends:
            decide_end()
            # The others decide at about the same time, and then take the end of this process for what it is.
            last = max(one.written for one in reports.values()) + self._patience(timeout) + 2 * self._tick
            time.sleep(min(max(last - time.time(), 0.0), _GATHERING_MOST))
        if report.rank == min(reports):
            self._tell(f"{_since(reports)}: {explanation.sentence}", explanation, laid)
        if self._limits.ends:
            self._drop_copies(reports)
            self._end()
        self._excused = time.monotonic()

    def _report(self, timeout: float, works: bool) -> Report:
        report = take(
            self._who, self._progress, self._record, quiet=self._quiet(), timeout=timeout, works=works
        )
        killed = killed_for_memory() - self._killed_before
        return replace(report, peers=self.peers.states(self._who.rank), killed_for_memory=killed)

    def _gather(self, own: Report, since: float, timeout: float) -> dict[int, Report]:
        """The ranks' reports: all of them, or those that came in time."""
        deadline = time.monotonic() + self._patience(timeout)
        while True:
            reports = {own.rank: own}
            for shelf in self._shelves:
                for rank, report in shelf.reports(since).items():
                    if report.world_size == own.world_size and rank not in reports:
                        reports[rank] = report
            if len(reports) == own.world_size or time.monotonic() >= deadline:
                return reports
            time.sleep(self._tick / 2)

    def _patience(self, timeout: float) -> float:
        """Seconds that the reports of the other ranks are waited for."""
        return min(_GATHERING * timeout, _GATHERING_MOST) + 2 * self._tick

    def _tell(self, text: str, explanation: Explanation, laid: Sequence[Path]) -> None:
        where = f"the ranks' reports are in {laid[0]}" if laid else "no report could be written"
        print(f"error: {text}; {where}", file=sys.stderr, flush=True)
        for shelf in self._shelves:
            shelf.say(explanation.sentence)

    def _drop_copies(self, reports: Mapping[int, Report]) -> None:
        """Those on the local disk have served when the run's own directory has all of them."""
        first, *others = self._shelves
        if set(reports) <= set(first.reports(self._began)):
            for shelf in others:
                shelf.clear()


def _since(reports: Mapping[int, Report]) -> str:
    return f"no progress for {max(report.quiet_seconds for report in reports.values()):.0f} s"


def readable(report: Report) -> str:
    """A report for people: what it says, the last calls, and the stacks of all threads."""
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
    return "\n".join([*lines, "", "as faulthandler sees them:", _faulthandler_dump()])


def _faulthandler_dump() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _beside(directory: Path) -> Path:
    """Where the ranks of one machine find each other's reports when ``directory`` is on a dead disk."""
    job = json.dumps([str(directory), os.environ.get("PADDLE_MASTER", ""), os.getuid()])
    return Path(tempfile.gettempdir()) / f"ppfleetx_hang_{blake2b(job.encode(), digest_size=6).hexdigest()}"


_current: Watchdog | None = None


def current() -> Watchdog | None:
    """The watchdog of this process."""
    return _current


def begin(who: Identity, limits: Limits, directory: Path, *, end: Callable[[], None]) -> Watchdog | None:
    """Watch this process from now on, in the place of an earlier watchdog; None: it is switched off."""
    global _current
    finish()
    PROGRESS.begin()
    if limits.timeout:
        _current = Watchdog(who, limits, directory, end=end)
        _current.start()
    return _current


def finish() -> None:
    """The run is over."""
    global _current
    if _current is not None:
        _current.stop()
        _current = None


def remember_peers(processes: Mapping[int, Any]) -> None:
    """The job's processes, as :meth:`Peers.own` of each rank."""
    if _current is not None:
        _current.peers.processes = {rank: tuple(one) for rank, one in processes.items()}
