"""What one rank knows of itself when a job does not go on: made by its watchdog, read by ``explain.py``."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ppfleetx.resilience.activity import Progress
from ppfleetx.resilience.flight_recorder import Call, CallRecord
from ppfleetx.resilience.os_processes import memory
from ppfleetx.resilience.places import importing, main_frame, main_place, raised_at, stacks

FORMAT = 1
_MOST_RANKS = 1 << 20
_MOST_BYTES = 1 << 26
_LONGEST = 600  # characters of an error
_PADDLE_WAITS = ("wait", "synchronize", "numpy", "item", "tolist", "__float__", "__int__", "__bool__")


@dataclass(frozen=True)
class CallNote:
    """One call of the record, as a file holds it.

    Attributes:
        operation, number, peer: as in :class:`~ppfleetx.resilience.flight_recorder.Call`; ``peer`` is a
            rank of the job, -1 of a collective.
        group: name and ranks, as in "the mp group [0..3]".
        group_id: Paddle's number of it, the same on all ranks.
        ranks: of the group, in the job.
        shape: of this rank's tensor; None without one.
        seconds_ago: when it began, before the report.
        state: ``done``, ``called`` (it has returned, and goes on in the background) or ``in the call``.
        asks: as of :class:`~ppfleetx.resilience.flight_recorder.Call`.
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
        """Under which the ranks that must take part have counted it, in :attr:`Report.counts`."""
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
    """One rank.

    Attributes:
        rank, world_size: its place in the job.
        written: seconds since 1970.
        step, place: what its program said last; and ``place_seconds`` before the report.
        quiet_seconds: since it last made progress.
        timeout: after so many seconds without, it counts as hung.
        works: it moves data, or computes and has not done so for too long, whatever its program said.
        computes: it computes, for however long.
        where: file, line and function of the main thread, or of the one that it waits for.
        importing: the module whose import is under way.
        waits_for: the call that the main thread waits for, or in which it has failed.
        failure: the error that has ended this rank; "" while there is none.
        lost: that error says that another rank has ended.
        counts: how many calls this rank has begun: ``5`` collectives of the group with that id, ``5>2``
            messages in it to rank 2, ``5<2`` from there.
        calls: the last ones, oldest first.
        peers: what this rank's kernel says of the job's processes on the same machine, where that explains
            silence: "is stopped", "has ended".
        killed_for_memory: processes that the kernel has killed for want of memory since the run began.
        memory: bytes.
        stacks: of all threads.
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
        """Whether this rank makes progress: it may be slow, but does not hang."""
        return not self.failure and (self.works or self.quiet_seconds < self.timeout / 2)

    @property
    def asks(self) -> bool:
        """Whether this rank reports because it makes no progress, and not because another asked it to."""
        return self.quiet_seconds >= self.timeout

    def to_json(self) -> str:
        """The file's content."""
        tree = asdict(self)
        tree["format"] = FORMAT
        return json.dumps(tree, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """What :meth:`to_json` gave.

        Raises:
            ValueError: it is no such thing.
        """
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("it is no JSON, or not all of it") from None
        if not isinstance(tree, dict) or tree.pop("format", None) != FORMAT:
            raise ValueError(f"it is no report of a rank in format {FORMAT}")
        try:
            report = _READER.validate_python(tree)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ValueError(f"{place}: {first['msg']}") from None
        if not 0 <= report.rank < report.world_size <= _MOST_RANKS:
            raise ValueError(f"there is no rank {report.rank} of {report.world_size}")
        return report


_READER = TypeAdapter(Report)  # made here: a thread that reports while an import hangs must import nothing


@dataclass(frozen=True)
class Identity:
    """Who reports: rank, size of the job, host and process."""

    rank: int = 0
    world_size: int = 1
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


def take(
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
    """This rank's report, as of now.

    Args:
        quiet: seconds since the last progress.
        failed: the error that ends it.
        timeout, works, computes, lost: see :class:`Report`.
    """
    record.join_device()
    now, frame = time.monotonic(), main_frame()
    if failed is not None:
        call = record.failed if lost or record.failed_with(failed) else None
    else:
        call = record.waited_for_main()
        if call is None and (record.reads or _waits_for_a_device(frame)):
            call = record.first_pending()
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
        failure="" if failed is None else _told(failed),
        lost=lost,
        waits_for=None if call is None else groups.note(call, now),
        counts=groups.counts(),
        calls=[groups.note(call, now) for call in list(record.calls)],
        memory=memory(),
        stacks=stacks(),
    )


def _told(error: BaseException) -> str:
    """The type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_LONGEST]}" if lines else type(error).__name__


def _waits_for_a_device(frame: Any) -> bool:
    """Whether the main thread waits for what it has asked a card to compute, and so for the collectives
    that come before."""
    for _ in range(4):
        if frame is None:
            return False
        if frame.f_code.co_name in _PADDLE_WAITS or "paddle" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class _Groups:
    """The ranks and the ids of process groups, which Paddle keeps beside them."""

    def __init__(self, record: CallRecord) -> None:
        collective = sys.modules.get("paddle.distributed.collective")
        groups = {} if collective is None else dict(collective._group_map)
        self._record = record
        self._known = {
            id(group.process_group): (number, tuple(group.ranks)) for number, group in groups.items()
        }

    def of(self, group: Any) -> tuple[int, tuple[int, ...]]:
        """The id and the ranks of a process group."""
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
        """:attr:`Report.counts`."""
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
    """``[0..3]`` of four ranks in a row, else ``[0, 2]``."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"[{ranks[0]}..{ranks[-1]}]"
    return f"[{', '.join(map(str, ranks))}]"


_SAME_HANG_SECONDS = 120.0  # within which the ranks report


def latest(reports: Mapping[int, Report]) -> dict[int, Report]:
    """The reports of the last of several hangs of a run, of which an earlier one may have had more ranks."""
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
    """The reports in a directory, by rank: of several of one rank the newest.

    Args:
        since: those written earlier (seconds since 1970) are passed over.
        faults: is told of the files that cannot be read, and why. They may be torn by a full disk, or gone;
            the other ranks' reports must do.
    """
    found: dict[int, Report] = {}
    for path in sorted(directory.glob("rank_*.json")):
        try:
            if not path.is_file() or path.stat().st_size > _MOST_BYTES:
                raise ValueError("it is no file, or too large to be a report")
            report = Report.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            if faults is not None:
                faults[path] = getattr(error, "strerror", None) or str(error)
            continue
        known = found.get(report.rank)
        if report.written >= since and (known is None or known.written < report.written):
            found[report.rank] = report
    return found
