"""The input of each check of ``ppfleetx doctor`` (:class:`Target`), its output (:class:`Row`), and the report
that consists of all rows."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from ppfleetx.config.message_text import counted, ranks_text
from ppfleetx.utils.device_support import HALF_TYPES

if TYPE_CHECKING:
    from ppfleetx.config.sections.root import RunConfig


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Row:
    """One row of the doctor's report: what a check has found.

    Attributes:
        name: what was checked.
        found: what the check found, as text.
        fix: what the user can do about the finding; never empty if the status is ``fail``.
        group: the heading under which the report shows the row.
        ranks: the ranks that the row is about. An empty tuple stands for all ranks that ran the check, or for
            the whole job.
        numbers: measurements by name. The name includes the unit.
    """

    name: str
    status: Status
    found: str
    fix: str = ""
    group: str = ""
    ranks: tuple[int, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        content = asdict(self)
        return {"group": content.pop("group"), "cure": content.pop("fix"), **content}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Row:
        known = dict(content)
        status, ranks = Status(known.pop("status")), tuple(known.pop("ranks"))
        return cls(status=status, ranks=ranks, fix=known.pop("cure"), **known)


def ok(name: str, found: str, **numbers: float) -> Row:
    return Row(name, Status.OK, found, numbers=numbers)


def warn(name: str, found: str, fix: str, **numbers: float) -> Row:
    """Return a report row for something that slows a job down or puts it at risk."""
    return Row(name, Status.WARN, found, fix, numbers=numbers)


def fail(name: str, found: str, fix: str, **numbers: float) -> Row:
    """Return a report row for something that stops a job or makes its results wrong."""
    return Row(name, Status.FAIL, found, fix, numbers=numbers)


def skipped(name: str, reason: str) -> Row:
    return Row(name, Status.SKIPPED, reason)


Result = TypeVar("Result")


@dataclass(frozen=True)
class Target:
    """What the doctor examines: this machine, this process of the job, and a run's configuration.

    Attributes:
        cfg: the configuration; None: examine only the machine.
        patience: upper bound on the time limits of all checks, in seconds. Values below 30 count as 30.
        found: report rows that exist before any check runs, such as a configuration error.
    """

    cfg: RunConfig | None = None
    device: str = "cpu"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    patience: float = 300.0
    found: tuple[Row, ...] = ()

    @property
    def float_types(self) -> tuple[str, ...]:
        """The floating-point types of the configured run, or all types without a configuration."""
        if self.cfg is None:
            return ("float32", "float64", *HALF_TYPES)
        precision = self.cfg.Engine.mix_precision
        return ("float32", "float64", *((precision.dtype,) if precision.enable else ()))


def lacks(dtype: str) -> bool:
    """Return whether this process's device cannot compute in ``dtype``."""
    from ppfleetx.distributed.device import has_kernels

    return dtype in HALF_TYPES and not has_kernels(dtype)


def within(seconds: float, act: Callable[[], Result]) -> Result:
    """Call ``act`` in a thread, and return its result or raise its error. If the call takes longer than
    ``seconds``, raises TimeoutError and leaves the thread running."""
    answer: Future[Result] = Future()

    def run() -> None:
        try:
            answer.set_result(act())
        except Exception as error:  # noqa: BLE001  (raised below)
            answer.set_exception(error)

    threading.Thread(target=run, name="within", daemon=True).start()
    return answer.result(timeout=seconds)


GROUPS = (
    *("nodes", "processes", "environment", "configuration", "files", "storage"),
    *("network", "agreement", "operators", "losses", "card", "collectives"),
)
"""The headings of the report, in order."""
_WIDEST, _NARROWEST = 160, 60
_MARGIN = 8  # width of the status column


def exit_code(rows: Iterable[Row]) -> int:
    return int(any(row.status is Status.FAIL for row in rows))


def joined(rows_of_ranks: Sequence[Sequence[Row]]) -> list[Row]:
    """Merge the report rows of all ranks into one list, sorted by heading. Rows that differ only in their
    numbers become one row. It has the numbers of the first rank that reported it, and its ``ranks`` are all
    ranks that reported it.

    If all ranks of the job reported the row, ``ranks`` is empty. For a row that is neither a warning nor a
    failure, it is enough that all ranks that ran the check reported it.
    """
    ranks: dict[tuple[Any, ...], list[int]] = {}
    first: dict[tuple[Any, ...], Row] = {}
    for rank, rows in enumerate(rows_of_ranks):
        for row in rows:
            key = (row.group, row.name, row.status, row.found, row.fix)
            first.setdefault(key, row)
            ranks.setdefault(key, []).append(rank)
    looked: dict[tuple[str, str], set[int]] = {}
    for key, those in ranks.items():
        looked.setdefault(key[:2], set()).update(those)
    rows = []
    for key, row in first.items():
        # For a row without a problem, ranks that did not run the check do not count.
        well = row.status in (Status.OK, Status.SKIPPED)
        everyone = looked[key[:2]] if well else set(range(len(rows_of_ranks)))
        rows.append(replace(row, ranks=() if everyone == set(ranks[key]) else tuple(ranks[key])))
    return in_groups(rows)


def in_groups(rows: Sequence[Row]) -> list[Row]:
    """Sort rows by heading in the order of :data:`GROUPS`. Rows with the same name are adjacent."""
    groups = list(dict.fromkeys((*GROUPS, *(row.group for row in rows))))
    names = list(dict.fromkeys((row.group, row.name) for row in rows))
    return sorted(rows, key=lambda row: (groups.index(row.group), names.index((row.group, row.name))))


def as_json(rows: Sequence[Row], world_size: int) -> str:
    content = {
        "ok": exit_code(rows) == 0,
        "world_size": world_size,
        "counts": _counts(rows),
        "rows": [row.as_json() for row in rows],
    }
    return json.dumps(content, indent=2)


def _counts(rows: Sequence[Row]) -> dict[Status, int]:
    return {status: sum(row.status is status for row in rows) for status in Status}


def as_table(rows: Sequence[Row]) -> str:
    """Return the report as text: each heading, followed by its rows with findings and fixes."""
    width = min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size((110, 24)).columns))
    names = max((len(row.name) for row in rows), default=0)
    lines: list[str] = []
    for group, members in groupby(rows, key=lambda row: row.group):
        lines += ["", group]
        for row in members:
            lines += _lines(row, names, width)
    return "\n".join([*lines[1:], "", verdict(rows)])


def verdict(rows: Sequence[Row]) -> str:
    counts = _counts(rows)
    parts = [f"{counts[status]} {status}" for status in Status if counts[status]]
    failed = counts[Status.FAIL]
    head = f"{counted(failed, 'check')} failed" if failed else "ready"
    return f"{head}: {', '.join(parts)}"


def _lines(row: Row, names: int, width: int) -> list[str]:
    who = f" [{ranks_text(row.ranks)}]" if row.ranks else ""
    head = f"  {row.status:<{_MARGIN}}{row.name:<{names}}  "
    blank = " " * len(head)
    text = _wrapped(f"{row.found}{who}", head, blank, width)
    return text + (_wrapped(f"fix: {row.fix}", blank, blank + "      ", width) if row.fix else [])


def _wrapped(text: str, head: str, blank: str, width: int) -> list[str]:
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, width, initial_indent=head, subsequent_indent=blank, **options)
