"""A thread per rank that notices when the run does not go on, and has all ranks say why.

1. A rank that has made no progress for the time-out lays down its report (``report.py``).
2. The others see it, and lay down theirs, whatever they are doing.
3. Each reads what is there after a short wait (a frozen rank writes nothing) and joins it
   (``explain.py``). When a rank still works, the job is slow, not hung, and is waited for. Otherwise the
   sentence is printed and every rank ends with exit code 4, or goes on waiting, as configured.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import math
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

from ppfleetx.resilience.activity import EVALUATING, GENERATING, MEETING, PROGRESS, STEPPING, Progress
from ppfleetx.resilience.explain import Explanation, explain, explain_alone
from ppfleetx.resilience.flight_recorder import RECORD, CallRecord
from ppfleetx.resilience.hang_report import Identity, Report, latest, take
from ppfleetx.resilience.os_processes import Activity, birth_of, killed_for_memory, machine, state_of
from ppfleetx.resilience.report_dir import PRIVATE, Shelf
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.peers import decide_end, is_end_decided

_GATHERING = 0.25  # of the time-out: so long the others' reports are waited for,
_GATHERING_LEAST, _GATHERING_MOST = 2.0, 20.0  # within these seconds
_WORKING_SHARE, _WORKING_BYTES = 0.2, 1 << 20  # of a core; a second
_COMPUTING = 3.0  # time-outs: so long a rank is waited for that computes and comes no further
_SAME_END_SECONDS = 60.0
_RAM = Path("/dev/shm")  # noqa: S108 (what is laid there is private)
_ON_DEVICE = (STEPPING, EVALUATING, GENERATING)


@dataclass(frozen=True)
class Limits:
    """``Engine.hang_timeout`` and its relatives.

    Attributes:
        timeout: seconds without progress, 0 for none.
        start_timeout: the same before the first step is done.
        ends: end the process; otherwise only report.
        counts_work: computing is progress in a step too, and where the program waits for its device, for a
            while. On a card it is not: a thread that waits for one spins.
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
        self._worked, self._excused = time.monotonic(), 0.0
        self._computes, self._slept_until = False, 0.0
        self._stop = threading.Event()
        self.directory = directory
        self._shelves = [Shelf(directory)]
        if who.world_size > 1 or not directory.exists():
            self._shelves += [Shelf(path, PRIVATE) for path in _beside(directory)]
        self._activity = Activity(self._own_seconds)
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
        latest = max(time.monotonic() - self._silence(), self._excused)
        if self._silence() < self._patience_with_computing:
            latest = max(latest, self._worked)
        return time.monotonic() - latest

    def _silence(self) -> float:
        """Seconds since the program or its communication was last heard of. Those in which this process did
        not run, because it was stopped as a whole, do not count."""
        heard = max(self._progress.since, self._record.last_activity, self._slept_until)
        return time.monotonic() - heard

    @property
    def _patience_with_computing(self) -> float:
        """Seconds of computing that count as progress although nothing is heard. A start may take long, and a
        process that is alone holds nobody up."""
        limits = self._limits
        if not self._progress.is_under_way or self._who.world_size == 1:
            return math.inf
        return _COMPUTING * limits.timeout

    def _notice_sleep(self, seconds: float) -> None:
        """This thread was woken so late that the process must have been stopped, or frozen with its job."""
        late = seconds - self._tick
        if late > max(1.0, self._tick):
            now, silence, quiet = time.monotonic(), self._silence(), self._quiet()
            self._slept_until = now - max(silence - late, 0.0)
            self._excused = max(self._excused, now - max(quiet - late, 0.0))
        if late > self._patience(
            self._timeout
        ):  # what was asked meanwhile has been decided without this rank
            self._seen_until = time.time()

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
            due = self._quiet() >= timeout
            if not due and time.monotonic() - news_at >= max(self._tick, timeout / 60):
                news_at = time.monotonic()
                due = any(shelf.has_news(self._seen_until) for shelf in self._shelves)
            if due:
                self._inquire(timeout, works)

    def _own_seconds(self) -> float:
        """What this watch has computed: reading reports is no progress."""
        own = 0.0 if threading.current_thread() is not getattr(self, "_thread", None) else time.thread_time()
        return own + sum(shelf.seconds for shelf in self._shelves)

    def _look_at_work(self) -> bool:
        self._computes, moves = self._activity.look(share=_WORKING_SHARE, size=_WORKING_BYTES)
        if not self._limits.counts_work and (self._record.reads or self._progress.place in _ON_DEVICE):
            self._computes = moves = False
        works = moves or (self._computes and self._silence() < self._patience_with_computing)
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
        explanation = explain(reports) if laid or report.world_size == 1 else explain_alone(report)
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
        elif self._limits.ends:
            time.sleep(self._tick)  # who tells is not to find this rank gone before it has
        if self._limits.ends:
            self._drop_copies(reports)
            self._end()
        self._excused = time.monotonic()

    def _report(self, timeout: float, works: bool) -> Report:
        quiet = self._quiet()
        return self._with_peers(
            take(
                self._who,
                self._progress,
                self._record,
                quiet=quiet,
                timeout=timeout,
                works=works,
                computes=self._computes,
            )
        )

    def _with_peers(self, report: Report) -> Report:
        killed = killed_for_memory() - self._killed_before
        return replace(report, peers=self.peers.states(self._who.rank), killed_for_memory=killed)

    def report_failure(self, error: Exception, *, lost: bool, at_end: bool) -> None:
        """Lay down what this rank was at when an error ended it, for ``ppfleetx hang-report``.

        Args:
            lost: the error says that another rank has ended.
            at_end: only when the process ends: a launcher may end it any moment, and it should have told its
                error first.
        """
        if self._who.world_size == 1 or is_end_decided():
            return
        self._shelves[0].open()
        if at_end:
            atexit.register(self._lay_failure, error, lost)
        else:
            self._lay_failure(error, lost)

    def _lay_failure(self, error: Exception, lost: bool) -> None:
        shelf = self._shelves[0]
        earlier = shelf.reports(time.time() - _SAME_END_SECONDS)
        if lost and any(report.asks for report in earlier.values()):
            return  # the others have ended because of a hang, and this is what follows from it
        report = take(
            self._who,
            self._progress,
            self._record,
            quiet=0.0,
            timeout=self._timeout,
            works=False,
            failed=error,
            lost=lost,
        )
        if shelf.lay(self._with_peers(report), readable(report)):
            shelf.say(explain(latest(shelf.reports(self._began))).sentence)

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
        return min(max(_GATHERING * timeout, _GATHERING_LEAST), _GATHERING_MOST) + 2 * self._tick

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


def _beside(directory: Path) -> list[Path]:
    """Where the ranks of one machine find each other's reports when ``directory`` is on a dead or full disk:
    on its local disk, and in its memory."""
    job = json.dumps([str(directory), os.environ.get("PADDLE_MASTER", ""), os.getuid()])
    name = f"ppfleetx_hang_{blake2b(job.encode(), digest_size=6).hexdigest()}"
    local = Path(tempfile.gettempdir())
    return [place / name for place in dict.fromkeys((local, _RAM)) if place.is_dir()]


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
