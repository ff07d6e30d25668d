"""What a check reports: rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Row:
    """One finding.

    Attributes:
        name: what was examined.
        status: one ``fail`` makes the exit code 1.
        found: what was found; for a skipped check the reason.
        cure: what to do about it; every ``fail`` has one.
        group: heading; filled in by :func:`ppfleetx.doctor.registry.examine`.
        ranks: who found this; empty: all that ran the check, or the job as a whole.
        numbers: measurements by name, which includes the unit.
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
    """A job will run, but not well."""
    return Row(name, Status.WARN, found, cure, numbers=numbers)


def fail(name: str, found: str, cure: str, **numbers: float) -> Row:
    """A job will not run, or will compute wrongly."""
    return Row(name, Status.FAIL, found, cure, numbers=numbers)


def skipped(name: str, reason: str) -> Row:
    """Not examined."""
    return Row(name, Status.SKIPPED, reason)
