"""What is examined, and by which process of the job."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from ppfleetx.doctor.rows import Row

if TYPE_CHECKING:
    from ppfleetx.config.sections.root import RunConfig

Result = TypeVar("Result")

_HALF_TYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Case:
    """What the checks are given.

    Attributes:
        cfg: the configuration of ``-c``; None: only the machine is examined.
        device: ``cpu`` or ``gpu``.
        rank: number of this process in the job.
        world_size: processes of the job.
        local_rank: number of this process on its node.
        local_size: processes of the job on this node.
        environ: the environment that checks read.
        patience: limit in seconds of checks that wait for a file system, a name server or a driver, where
            their own limit is not shorter.
        found: rows from before the checks, e.g. of a configuration that cannot be read.
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
        """Floating-point types that the plan computes in; without a configuration, all."""
        if self.cfg is None:
            return ("float32", "float64", *_HALF_TYPES)
        precision = self.cfg.Engine.mix_precision
        return ("float32", "float64", *((precision.dtype,) if precision.enable else ()))


def lacks(dtype: str) -> bool:
    """Whether this process's device does not compute in a type that a plan may name."""
    from ppfleetx.parallel.precision import has_kernels

    return dtype in _HALF_TYPES and not has_kernels(dtype)


def within(seconds: float, act: Callable[[], Result]) -> Result:
    """Call ``act`` in a thread that is abandoned if it does not end: a disk or name server may never answer.

    Raises:
        TimeoutError: it has not ended in time.
        Exception: whatever ``act`` raises.
    """
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
