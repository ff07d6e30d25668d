"""The input of a check (:class:`Target`) and its output (:class:`Row`)."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ppfleetx.config.sections.root import RunConfig


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Row:
    """One finding. A single ``fail``, which always has a ``fix``, makes the exit code 1. ``ranks`` found
    this; empty for all ranks that ran the check, or for the job as a whole. ``numbers`` are measurements by
    name, which includes the unit."""

    name: str
    status: Status
    found: str
    fix: str = ""
    group: str = ""
    ranks: tuple[int, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "name": self.name,
            "status": str(self.status),
            "found": self.found,
            "cure": self.fix,
            "ranks": list(self.ranks),
            "numbers": dict(self.numbers),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Row:
        known = dict(content)
        status, ranks = Status(known.pop("status")), tuple(known.pop("ranks"))
        return cls(status=status, ranks=ranks, fix=known.pop("cure"), **known)


def ok(name: str, found: str, **numbers: float) -> Row:
    return Row(name, Status.OK, found, numbers=numbers)


def warn(name: str, found: str, fix: str, **numbers: float) -> Row:
    """A row for something that slows a job down or puts it at risk."""
    return Row(name, Status.WARN, found, fix, numbers=numbers)


def fail(name: str, found: str, fix: str, **numbers: float) -> Row:
    """A row for something that stops a job or makes its results wrong."""
    return Row(name, Status.FAIL, found, fix, numbers=numbers)


def skipped(name: str, reason: str) -> Row:
    return Row(name, Status.SKIPPED, reason)


Result = TypeVar("Result")

_HALF_TYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Target:
    """The machine, process and configuration (None: only the machine) to examine. ``patience`` is the time
    limit in seconds for checks that wait for a file system, a name server or a driver, unless their own limit
    is shorter; ``found`` are rows that exist before any check runs."""

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
        """The floating-point types that the plan computes in; without a configuration, all types."""
        if self.cfg is None:
            return ("float32", "float64", *_HALF_TYPES)
        precision = self.cfg.Engine.mix_precision
        return ("float32", "float64", *((precision.dtype,) if precision.enable else ()))


def lacks(dtype: str) -> bool:
    """Whether this process's device cannot compute in ``dtype``."""
    from ppfleetx.parallel.precision import has_kernels

    return dtype in _HALF_TYPES and not has_kernels(dtype)


def within(seconds: float, act: Callable[[], Result]) -> Result:
    """Call ``act`` in a thread, and abandon it with TimeoutError at the time limit, because a disk or name
    server may never answer. Raises whatever ``act`` raises."""
    answers: queue.SimpleQueue[tuple[Result | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((act(), None))
        except Exception as error:  # noqa: BLE001  (raised below)
            answers.put((None, error))

    threading.Thread(target=run, name="within", daemon=True).start()
    try:
        result, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result
