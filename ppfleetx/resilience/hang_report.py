"""The hang report: what a rank was doing when the job made no progress, or when an error ended the rank.

Every access to the directory of reports has a time limit, because a broken disk may be why the job hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ppfleetx.resilience.flight_recorder import Call, CallRecord
from ppfleetx.resilience.progress import Progress
from ppfleetx.utils.machine import memory
from ppfleetx.utils.output_files import atomic_write

FORMAT = 1
_LONGEST = 600  # characters of an error message
_IMPORTS = "<frozen importlib._bootstrap>"
_WAITING_FILES = ("threading.py", "queue.py", "selectors.py", "subprocess.py", "socket.py", "_base.py")
_IDLE = "_worker"  # the function in which an idle thread of a pool waits
_PADDLE_WAITS = ("wait", "synchronize", "numpy", "item", "tolist", "__float__", "__int__", "__bool__")


@dataclass(frozen=True)
class CallNote:
    """One collective or message in a hang report.

    Attributes:
        operation: name of the operation, such as ``all_reduce``.
        number: number of the call in its group, from 0. Messages to and from each rank are counted
            separately.
        peer: the rank of the job to which a message is sent or from which it comes; -1 for a collective.
        group: name and ranks of the process group, such as "the mp group [0..3]".
        group_id: Paddle's id of the process group, the same on all ranks.
        ranks: the group's members, as ranks of the job.
        shape: shape of this rank's input tensor; None if there is none.
        seconds_ago: time from the start of the call to the report.
        state: ``in the call``; ``called`` if the call has returned and the operation continues; or ``done``.
        asks: whether the call only polls other ranks.
    """

    operation: str
    number: int
    peer: int
    group: str
    group_id: int
    ranks: tuple[int, ...]
    shape: tuple[int, ...] | None
    dtype: str
    seconds_ago: float
    state: str
    asks: bool = False

    @property
    def others_key(self) -> str:
        """The key under which other ranks count this call in their :attr:`Report.counts`. For a collective of
        process group 5, it is ``5``. For a message in this group, it is ``5<`` or ``5>``, to which the caller
        must append this rank's number in the job."""
        if self.peer < 0:
            return str(self.group_id)
        # The other rank counts a send of this rank as a receive, and the reverse.
        return f"{self.group_id}{'<' if self.operation == 'send' else '>'}"

    def __str__(self) -> str:
        if self.peer >= 0:
            way = "to" if self.operation == "send" else "from"
            return f"{self.operation} #{self.number} {way} rank {self.peer} in {self.group}"
        return f"{self.operation} #{self.number} of {self.group}"


@dataclass(frozen=True)
class Report:
    """The hang report of one rank.

    Attributes:
        written: when the report was made, in seconds since 1970.
        step: optimizer step; None before the first.
        place, place_seconds: what the program was doing, such as "reading data", and for how long.
        quiet_seconds: seconds since this rank last made progress.
        timeout: seconds without progress after which a rank counts as hung.
        works: whether the rank's CPU or file activity counts as progress.
        computes: whether the rank uses the CPU. Unlike ``works``, this stays True when the CPU use has lasted
            too long to count as progress.
        where: the position of the main thread (file, line and function). If it waits for a helper thread, the
            position of that thread. After a failure, the position at which the error was raised.
        importing: the name of the module that is being imported, or None.
        waits_for: the call in which the main thread waits, or which failed.
        failure: the error that ended this rank, or "".
        lost: whether ``failure`` only says that another rank has ended.
        counts: how many calls this rank has begun. The key ``5`` counts the collectives of process group 5,
            ``5>2`` the messages to rank 2 in this group, and ``5<2`` the messages from rank 2.
        calls: the last recorded calls, oldest first.
        peers: by rank, why other processes of the job on this machine do not respond; "" for processes that
            run normally.
        killed_for_memory: how many processes the kernel has killed for lack of memory since the run began.
        memory: memory of this process and of the machine in bytes, by name.
        stacks: the Python stack of each thread, by the thread's name and number.
    """

    rank: int
    world_size: int
    host: str
    pid: int
    written: float
    step: int | None
    place: str
    place_seconds: float
    quiet_seconds: float
    timeout: float
    works: bool
    where: str
    importing: str | None = None
    computes: bool = False
    failure: str = ""
    lost: bool = False
    waits_for: CallNote | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    calls: Sequence[CallNote] = ()
    peers: Mapping[int, str] = field(default_factory=dict)
    killed_for_memory: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)
    stacks: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        """Whether this rank still makes progress. It may be slow, but it does not hang."""
        return not self.failure and (self.works or self.quiet_seconds < self.timeout / 2)

    @property
    def asks(self) -> bool:
        """Whether this report asks the other ranks for theirs. It does if this rank made no progress for
        ``timeout`` seconds."""
        return self.quiet_seconds >= self.timeout

    def to_json(self) -> str:
        tree = asdict(self)
        tree["format"] = FORMAT
        return json.dumps(tree, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Return the report that :meth:`to_json` has written as ``text``. Raises ValueError if ``text`` is
        not a complete report."""
        try:
            tree = json.loads(text)
        except ValueError:
            raise ValueError("not JSON, or incomplete") from None
        if not isinstance(tree, dict) or tree.pop("format", None) != FORMAT:
            raise ValueError(f"not a rank's report in format {FORMAT}")
        try:
            return _READER.validate_python(tree)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ValueError(f"{place}: {first['msg']}") from None


_READER = TypeAdapter(Report)  # created now, because a thread that reports a hanging import must not import


@dataclass(frozen=True)
class Identity:
    rank: int = 0
    world_size: int = 1
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


def capture_report(
    who: Identity,
    progress: Progress,
    record: CallRecord,
    *,
    quiet: float,
    timeout: float,
    works: bool,
    computes: bool = False,
    failed: BaseException | None = None,
    lost: bool = False,
) -> Report:
    """Return the hang report of this rank.

    Args:
        quiet: seconds since this rank last made progress.
        timeout: seconds without progress after which a rank counts as hung.
        works: whether the rank's CPU or file activity counts as progress.
        computes: whether the rank uses the CPU. Unlike ``works``, this stays True when the CPU use has lasted
            too long to count as progress.
        failed: the error that ends the rank, or None.
        lost: whether ``failed`` only says that another rank has ended.
    """
    record.select_card_for_thread()
    now, frame = time.monotonic(), sys._current_frames().get(threading.main_thread().ident)
    helper = _place_of_helper(record.helper) if record.helper else ""
    call = None
    if failed is not None:
        call = record.failed if lost or record.failure is failed else None
    elif not helper:  # with a helper, the rank waits for its own thread, not for the ranks that it polls
        call = record.waited_for(threading.main_thread().ident)
        if call is None and (record.reads or _waits_for_a_device(frame)):
            call = next((call for call in list(record.calls) if not call.is_done), None)
    groups = _Groups(record)
    return Report(
        **asdict(who),
        written=time.time(),
        step=progress.step,
        place=progress.place,
        place_seconds=round(now - progress.since, 3),
        quiet_seconds=round(quiet, 3),
        timeout=timeout,
        works=works,
        computes=computes,
        where=raised_at(failed) if failed is not None else helper or innermost(frame),
        importing=importing(frame),
        failure="" if failed is None else _first_line(failed),
        lost=lost,
        waits_for=None if call is None else groups.note(call, now),
        counts=groups.counts(),
        calls=[groups.note(call, now) for call in list(record.calls)],
        memory=memory(),
        stacks=stacks(),
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_LONGEST]}" if lines else type(error).__name__


def _waits_for_a_device(frame: Any) -> bool:
    """Return whether the main thread seems to wait for the device: it is inside Paddle. ``frame`` is the
    Python frame that the thread executes."""
    for _ in range(4):
        if frame is None:
            return False
        if frame.f_code.co_name in _PADDLE_WAITS or "paddle" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class _Groups:
    """Looks up the id and the ranks of a process group. Paddle does not keep them in the group itself."""

    def __init__(self, record: CallRecord) -> None:
        collective = sys.modules.get("paddle.distributed.collective")
        groups = {} if collective is None else dict(collective._group_map)
        self._record = record
        self._known = {
            id(group.process_group): (number, tuple(group.ranks)) for number, group in groups.items()
        }

    def of(self, group: Any) -> tuple[int, tuple[int, ...]]:
        known = self._known.get(id(group))
        return known or (getattr(group, "group_id", -1), tuple(getattr(group, "ranks", ())))

    def note(self, call: Call, now: float) -> CallNote:
        number, ranks = self.of(call.group)
        name = self._record.names.get(number)
        named = f"group {number}" if name is None else f"the {name} group"
        state = "in the call" if not call.ended else "done" if call.is_done else "called"
        return CallNote(
            operation=call.operation,
            number=call.number,
            peer=_member(ranks, call.peer),
            group=f"{named} {shown_ranks(ranks)}",
            group_id=number,
            ranks=ranks,
            shape=None if call.shape is None else tuple(int(size) for size in call.shape),
            dtype="" if call.dtype is None else str(call.dtype).rpartition(".")[2],
            seconds_ago=round(now - call.begun, 3),
            state=state,
            asks=call.asks,
        )

    def counts(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for group, counts in self._record.totals():
            number, ranks = self.of(group)
            for (way, peer), count in counts.items():
                found[f"{number}{way}{_member(ranks, peer)}" if way else str(number)] = count
        return found


def _member(ranks: Sequence[int], index: int) -> int:
    return ranks[index] if 0 <= index < len(ranks) else index


def shown_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"[{ranks[0]}..{ranks[-1]}]"
    return f"[{', '.join(map(str, ranks))}]"


# -- the place of a thread, from its Python stack --------------------------------------------


def _place_of_helper(name: str) -> str:
    """Return where a helper thread is, as ``file.py:12 in function, in thread data_0``. This is the first
    busy thread whose name begins with ``name``. Returns "" if all these threads are idle or have ended."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name.startswith(name):
            where = innermost(frames.get(thread.ident or 0))
            if where and not where.endswith(f" in {_IDLE}"):
                return f"{where}, in thread {thread.name}"
    return ""


def raised_at(error: BaseException) -> str:
    """Return where an error was raised, as ``file.py:12 in function``."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else _line_of(trace.tb_frame, trace.tb_lineno)


def innermost(frame: FrameType | None) -> str:
    """Return where a thread is, as ``file.py:12 in function``. Functions of the standard library in which
    threads wait are skipped."""
    while frame is not None and frame.f_back is not None and _is_waiting(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    return _line_of(frame, frame.f_lineno)


def _line_of(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{line} in {frame.f_code.co_name}"


def _is_waiting(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith("<") or path.rpartition("/")[2] in _WAITING_FILES


def importing(frame: FrameType | None) -> str | None:
    """Return the name of the module that a thread is importing, or None. With nested imports, this is the
    innermost module."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTS and frame.f_code.co_name == "_find_and_load":
            return str(frame.f_locals.get("name"))
        frame = frame.f_back
    return None


def stacks() -> dict[str, list[str]]:
    """Return the Python stack of each thread, by the thread's name and number, as in ``watchdog (1402)``. The
    outermost call comes first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = {}
    for ident, frame in sys._current_frames().items():
        lines = [
            f"{entry.filename}:{entry.lineno} in {entry.name}: {entry.line or ''}".rstrip(": ")
            for entry in traceback.extract_stack(frame)
        ]
        found[f"{names.get(ident, 'unknown')} ({ident})"] = lines
    return found


# -- reports in files --------------------------------------------------------------------

HANG_DIRS = ("hang", "hang_evaluation", "hang_generation")
"""Subdirectories of an output directory for training, evaluation and generation."""
PATIENCE_SECONDS = 5.0
_SUMMARY = "summary.txt"

Result = TypeVar("Result")
_SAME_HANG_SECONDS = 120.0  # the reports of one hang are written within this time


def latest(reports: Mapping[int, Report]) -> dict[int, Report]:
    """Return only the reports of the last hang. The directory may also contain reports of earlier hangs, or
    of a job with another number of ranks."""
    if not reports:
        return {}
    last = max(reports.values(), key=lambda report: report.written)
    return {
        rank: one
        for rank, one in reports.items()
        if one.written > last.written - _SAME_HANG_SECONDS and one.world_size == last.world_size
    }


def read_reports(
    directory: Path, *, since: float = 0.0, faults: dict[Path, str] | None = None
) -> dict[int, Report]:
    """Return the newest hang report of each rank in a directory. Reports written before ``since`` (seconds
    since 1970) are ignored. Files that cannot be read are added to ``faults`` with the reason."""
    found: dict[int, Report] = {}
    for path in sorted(directory.glob("rank_*.json")):
        try:
            report = Report.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            if faults is not None:
                faults[path] = getattr(error, "strerror", None) or str(error)
            continue
        known = found.get(report.rank)
        if report.written >= since and (known is None or known.written < report.written):
            found[report.rank] = report
    return found


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
        """Return whether a rank that makes no progress has written a report after ``since`` (seconds since
        1970). Such a report asks all other ranks to write theirs."""

        def look() -> bool:
            if any(path.stat().st_mtime > since for path in self.directory.glob("rank_*.json")):
                return any(report.asks for report in read_reports(self.directory, since=since).values())
            return False

        return bool(self._do_in_thread(look))

    def write(self, report: Report, text: str) -> bool:
        """Write this rank's report to the directory, as JSON for other ranks and as ``text`` for the user.
        Returns whether the JSON file was written. The text file can be missing even then."""

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
        if ``act`` fails or takes too long."""
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
