"""What is examined, and by which process of the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ppfleetx.doctor.rows import Row

if TYPE_CHECKING:
    from ppfleetx.config.sections.root import RunConfig

_HALF_TYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Case:
    """What the checks are given.

    Attributes:
        cfg: the configuration of ``-c``; None: the machine alone is looked at.
        device: ``cpu`` or ``gpu``.
        rank: number of this process in the job.
        world_size: processes of the job.
        local_rank: number of this process on its node.
        local_size: processes of the job on this node.
        environ: the environment that checks read.
        patience: seconds after which a check is given up that waits for a file system, a name server or a
            driver, where its own limit is not shorter.
        found: rows from before the checks begin, as of a configuration that cannot be read.
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
        """Floating-point types that the plan computes in; without a configuration, all that there are."""
        if self.cfg is None:
            return ("float32", "float64", *_HALF_TYPES)
        precision = self.cfg.Engine.mix_precision
        return ("float32", "float64", *((precision.dtype,) if precision.enable else ()))


def lacks(dtype: str) -> bool:
    """Whether this process's device does not compute in a type that a plan may name."""
    from ppfleetx.parallel.precision import has_kernels

    return dtype in _HALF_TYPES and not has_kernels(dtype)
