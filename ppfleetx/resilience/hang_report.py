"""The report that each rank writes when a job makes no progress."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ppfleetx.resilience.flight_recorder import Call, CallRecord
from ppfleetx.resilience.heartbeat import Progress
from ppfleetx.utils.machine import memory

FORMAT = 1
_LONGEST = 600  # characters of an error message
_IMPORTS = "<frozen importlib._bootstrap>"
_WAITING_FILES = ("threading.py", "queue.py", "selectors.py", "subprocess.py", "socket.py", "_base.py")
# Files in which the main thread waits for other threads, with the name prefixes of these threads.
_HELPERS = {"loader.py": "data", "manager.py": "checkpoint", "coordination.py": "first-on-node"}
_IDLE = "_worker"  # the function in which an idle thread of a pool waits
_PADDLE_WAITS = ("wait", "synchronize", "numpy", "item", "tolist", "__float__", "__int__", "__bool__")


@dataclass(frozen=True)
class CallNote:
    """One recorded call in a report.

    Attributes:
        operation, number, peer, asks: see :class:`~ppfleetx.resilience.flight_recorder.Call`; ``peer`` is a
            rank of the job, -1 for a collective.
        group: the group's name and ranks, e.g. "the mp group [0..3]".
        group_id: Paddle's number of the group, the same on all ranks.
        ranks: ranks of the group, numbered within the job.
        shape: shape of this rank's tensor, if there is one.
        seconds_ago: time from the start of the call to the report.
        state: ``done``, ``called`` (it returned and continues in the background) or ``in the call``.
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
        """The key under which the other participants count this call in :attr:`Report.counts`."""
        if self.peer < 0:
            return str(self.group_id)
        return f"{self.group_id}{'<' if self.operation == 'send' else '>'}"

    def __str__(self) -> str:
        if self.peer >= 0:
            way = "to" if self.operation == "send" else "from"
            return f"{self.operation} #{self.number} {way} rank {self.peer} in {self.group}"
        return f"{self.operation} #{self.number} of {self.group}"


@dataclass(frozen=True)
class Report:
    """The report of one rank.

    Attributes:
        rank, world_size: number of this rank, and number of ranks in the job.
        written: time of the report, in seconds since 1970.
        step, place: step and activity of the program since ``place_seconds`` before the report.
        quiet_seconds: time since the rank's last progress.
        timeout: seconds without progress after which the rank counts as hung.
        works: whether the rank moves data, or has been computing for less than the limit.
        computes: whether the rank computes, for any length of time.
        where: file, line and function where the main thread is, or the thread that it waits for.
        importing: module that is being imported, if any.
        waits_for: call that the main thread waits for, or that failed.
        failure: error that ended this rank, or "".
        lost: whether ``failure`` says that another rank has ended.
        counts: number of calls that this rank has begun. The key ``5`` counts collectives of the group with
            id 5, ``5>2`` messages to rank 2 in this group, and ``5<2`` messages from rank 2.
        calls: last calls, oldest first.
        peers: state in the kernel of the job's other processes on this machine, if it explains why they do
            not respond: "is stopped", "has ended".
        killed_for_memory: number of processes that the kernel has killed for lack of memory since the run
            began.
        memory: sizes of memory in bytes.
        stacks: stacks of all threads.
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
        """Whether this rank makes progress, so that it may be slow but does not hang."""
        return not self.failure and (self.works or self.quiet_seconds < self.timeout / 2)

    @property
    def asks(self) -> bool:
        """Whether this rank reports because it makes no progress, and not because another rank requested a
        report."""
        return self.quiet_seconds >= self.timeout

    def to_json(self) -> str:
        tree = asdict(self)
        tree["format"] = FORMAT
        return json.dumps(tree, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Parse the output of :meth:`to_json`.

        Raises:
            ValueError: the text is not a report.
        """
        try:
            tree = json.loads(text)
        except ValueError:
            raise ValueError("not JSON, or incomplete") from None
        if not isinstance(tree, dict) or tree.pop("format", None) != FORMAT:
            raise ValueError(f"not a rank's report in format {FORMAT}")
        try:
            report = _READER.validate_python(tree)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ValueError(f"{place}: {first['msg']}") from None
        if not 0 <= report.rank < report.world_size:
            raise ValueError(f"there is no rank {report.rank} of {report.world_size}")
        return report


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
    """Make this rank's report.

    Args:
        quiet: seconds since the last progress.
        failed: error that ends the rank.
        timeout, works, computes, lost: see :class:`Report`.
    """
    record.join_device()
    now, frame = time.monotonic(), sys._current_frames().get(threading.main_thread().ident)
    if failed is not None:
        call = record.failed if lost or record.failure is failed else None
    else:
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
        where=main_place(frame) if failed is None else raised_at(failed),
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
    """Return whether the main thread waits for its card, and therefore for the collectives queued on it."""
    for _ in range(4):
        if frame is None:
            return False
        if frame.f_code.co_name in _PADDLE_WAITS or "paddle" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class _Groups:
    """Looks up ranks and ids of process groups, which Paddle stores elsewhere."""

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
        for group, count, to, back in self._record.totals().values():
            number, ranks = self.of(group)
            found[str(number)] = count
            for sign, messages in ((">", to), ("<", back)):
                for peer, sent in dict(messages).items():
                    found[f"{number}{sign}{_member(ranks, peer)}"] = sent
        return found


def _member(ranks: Sequence[int], index: int) -> int:
    return ranks[index] if 0 <= index < len(ranks) else index


def shown_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"[{ranks[0]}..{ranks[-1]}]"
    return f"[{', '.join(map(str, ranks))}]"


# -- the place of a thread, from its Python stack --------------------------------------------


def main_place(frame: FrameType | None) -> str:
    """Return the :func:`innermost` call of the main thread, or of the helper thread that it waits for."""
    own = innermost(frame)
    begins = _HELPERS.get(own.partition(":")[0])
    if begins is None or frame is None or not _is_waiting(frame):
        return own
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name.startswith(begins):
            where = innermost(frames.get(thread.ident or 0))
            if where and not where.endswith(f" in {_IDLE}"):
                return f"{where}, in thread {thread.name}"
    return own


def raised_at(error: BaseException) -> str:
    """Return the place where an error was raised, as ``file.py:12 in function``."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else _line_of(trace.tb_frame, trace.tb_lineno)


def innermost(frame: FrameType | None) -> str:
    """Return the innermost call that is not a wait in the standard library, as ``file.py:12 in function``."""
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
    """Return the innermost module that is being imported, or None."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTS and frame.f_code.co_name == "_find_and_load":
            return str(frame.f_locals.get("name"))
        frame = frame.f_back
    return None


def stacks() -> dict[str, list[str]]:
    """Return the Python stack of each thread, outermost call first, by the thread's name."""
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

_SAME_HANG_SECONDS = 120.0  # the reports of one hang are written within this time


def latest(reports: Mapping[int, Report]) -> dict[int, Report]:
    """Return the reports of the last hang in a directory, which may also contain reports of earlier hangs or
    larger jobs."""
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
    """Return the newest report of each rank in a directory.

    Args:
        since: ignore reports written before this time (seconds since 1970).
        faults: a dictionary that is filled with the files that cannot be read, and the reasons; a full disk
            may have truncated them.
    """
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
