"""What a check says: rows of one shape, which the table, the JSON and tests read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How a check has ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Row:
    """One finding.

    Attributes:
        name: what was looked at.
        status: how that ended; one ``fail`` makes the exit code 1.
        found: what was found; of a skipped check: the reason.
        cure: what to do about it; every ``fail`` has one.
        group: of the check; filled in by :func:`ppfleetx.doctor.registry.examine`.
        ranks: who has found this; empty: all who looked, or the job as a whole.
        numbers: what was measured, by name with its unit.
    """

    name: str
    status: Status
    found: str
    cure: str = ""
    group: str = ""
    ranks: tuple[int, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The row as ``doctor --json`` prints it."""
        return {
            "group": self.group,
            "name": self.name,
            "status": str(self.status),
            "found": self.found,
            "cure": self.cure,
            "ranks": list(self.ranks),
            "numbers": dict(self.numbers),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Row:
        """The row that :meth:`as_json` gave."""
        known = dict(content)
        status, ranks = Status(known.pop("status")), tuple(known.pop("ranks"))
        return cls(status=status, ranks=ranks, **known)


def ok(name: str, found: str, **numbers: float) -> Row:
    """All is well."""
    return Row(name, Status.OK, found, numbers=numbers)


def warn(name: str, found: str, cure: str, **numbers: float) -> Row:
    """A job will run, but not as well as it could."""
    return Row(name, Status.WARN, found, cure, numbers=numbers)


def fail(name: str, found: str, cure: str, **numbers: float) -> Row:
    """A job will not run, or will not compute what it should."""
    return Row(name, Status.FAIL, found, cure, numbers=numbers)


def skipped(name: str, reason: str) -> Row:
    """Not looked at."""
    return Row(name, Status.SKIPPED, reason)
