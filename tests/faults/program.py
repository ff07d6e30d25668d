"""The training program in ranks of a pool, with simulated disk errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.checkpoint.resolve_checkpoint import complete_checkpoints
from ppfleetx.config.parallel_plan import ParallelPlan
from tests.e2e import program

# Saves every step of a run of four; dropout is on.
EVERY_STEP = {
    "Model.num_layers": 4,
    "Model.hidden_dropout_prob": 0.1,
    "Model.attention_probs_dropout_prob": 0.1,
    "Engine.max_steps": 4,
    "Engine.save_load.save_steps": 1,
}
TRAIN = "tests.e2e.program:train"


class Program:
    """Runs the training program, or one of this file, under one plan; ``save_load`` sets keys of that
    section."""

    def __init__(
        self, pools: Any, corpus: Path, output_dir: Path, plan: ParallelPlan | None = None, **save_load: Any
    ) -> None:
        self.plan, self.output_dir = plan or ParallelPlan(), output_dir
        self.pool = pools(self.plan.world_size)
        given = {
            f"Engine.save_load.{key}": str(value) if isinstance(value, Path) else value
            for key, value in save_load.items()
        }
        self.values = program.values_of(self.plan, corpus, output_dir, overrides={**EVERY_STEP, **given})

    def call(self, target: str = TRAIN, **arguments: Any) -> Any:
        """The outcome of each rank."""
        arguments = {"values": self.values, "world": self.plan.world_size, **arguments}
        return self.pool.call(target, timeout=120.0, **arguments)

    def fail_at(self, *steps: int, fault: str = "no space", rank: int = 0) -> Any:
        return self.call("tests.faults.program:train_with", fault=fault, failing_steps=steps, rank=rank)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints."""
        return sorted(open_checkpoint(path).step for path in complete_checkpoints(self.output_dir))


def _disk_error(number: int) -> Callable[..., None]:
    def fail(path: Path, write: Callable[[], Any]) -> None:
        raise OSError(number, os.strerror(number), str(path))

    return fail


def _flip(path: Path, write: Callable[[], Any]) -> Any:
    """Bytes that do not arrive as they were written."""
    written, content = write(), path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return written


def _raise_type_error(path: Path, write: Callable[[], Any]) -> None:
    raise TypeError("a defect")


FAULTS: dict[str, Callable[[Path, Callable[[], Any]], Any]] = {
    "no space": _disk_error(errno.ENOSPC),
    "read only": _disk_error(errno.EROFS),
    "not allowed": _disk_error(errno.EACCES),
    "flipped bit": _flip,
    "defect": _raise_type_error,
}
"""By name, what happens in place of ``write``, which would write a file of a checkpoint to ``path``."""


def train_with(
    values: Mapping[str, Any], world: int, fault: str, failing_steps: list[int], rank: int
) -> None:
    """Train; on ``rank``, the checkpoints of these steps are written with a fault."""
    from ppfleetx.checkpoint import storage

    write = storage.write_safetensors

    def changed(path: Path, relative: str, pieces: Any) -> Any:
        step = int(path.parent.parent.name.rsplit("_", 1)[1])
        if step in failing_steps and int(os.environ["PADDLE_TRAINER_ID"]) == rank:
            return FAULTS[fault](path, lambda: write(path, relative, pieces))
        return write(path, relative, pieces)

    with mock.patch.object(storage, "write_safetensors", changed):
        program.train(values, world)
