"""The training program in ranks of a pool, with simulated disk errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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

    def fail_at(self, *steps: int, number: int = errno.ENOSPC, rank: int = 0) -> Any:
        target = "tests.faults.program:train_on_a_failing_disk"
        return self.call(target, failing_steps=steps, number=number, rank=rank)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints."""
        return sorted(open_checkpoint(path).step for path in complete_checkpoints(self.output_dir))


@contextmanager
def _writing(
    act: Callable[[Path, Callable[[], Any]], Any], steps: Sequence[int], rank: int
) -> Iterator[None]:
    """Replace the function that writes checkpoint files of these steps on this rank by ``act(path,
    write)``."""
    from ppfleetx.checkpoint import storage

    write = storage.write_safetensors

    def changed(path: Path, relative: str, pieces: Any) -> Any:
        step = int(path.parent.parent.name.rsplit("_", 1)[1])
        if step in steps and int(os.environ["PADDLE_TRAINER_ID"]) == rank:
            return act(path, lambda: write(path, relative, pieces))
        return write(path, relative, pieces)

    storage.write_safetensors = changed
    try:
        yield
    finally:
        storage.write_safetensors = write


def train_on_a_failing_disk(
    values: Mapping[str, Any], world: int, failing_steps: list[int], number: int, rank: int = 0
) -> None:
    """Train; on ``rank``, writing the checkpoints of these steps fails with this error."""

    def fail(path: Path, write: Callable[[], Any]) -> None:
        raise OSError(number, os.strerror(number), str(path))

    with _writing(fail, failing_steps, rank):
        program.train(values, world)


def train_with_bytes_that_do_not_arrive(
    values: Mapping[str, Any], world: int, failing_steps: list[int], rank: int
) -> None:
    """Train; on ``rank``, one bit of the written checkpoints of these steps is flipped."""

    def flip(path: Path, write: Callable[[], Any]) -> Any:
        written, content = write(), path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        return written

    with _writing(flip, failing_steps, rank):
        program.train(values, world)


def train_with_a_defect(values: Mapping[str, Any], world: int, failing_steps: list[int], rank: int) -> None:
    """Train; on ``rank``, the code that writes the checkpoints of these steps is wrong."""

    def fail(path: Path, write: Callable[[], Any]) -> None:
        raise TypeError("a defect")

    with _writing(fail, failing_steps, rank):
        program.train(values, world)
