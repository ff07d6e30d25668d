"""The training program in ranks of a pool, with disks that fail."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.e2e import program

# Saves every step of a run of four; dropout is on.
EVERY_STEP = {
    "Model.num_layers": 4,
    "Model.hidden_dropout_prob": 0.1,
    "Model.attention_probs_dropout_prob": 0.1,
    "Engine.max_steps": 4,
    "Engine.save_load.save_steps": 1,
}


def train_on_a_failing_disk(
    values: Mapping[str, Any], world: int, failing_steps: list[int], number: int, rank: int = 0
) -> None:
    """Train; on ``rank`` writing the checkpoints of these steps fails with this error."""
    from ppfleetx.checkpoint import storage

    write = storage.write_safetensors

    def write_or_fail(path: Path, relative: str, pieces: Any) -> Any:
        step = int(path.parent.parent.name.rsplit("_", 1)[1])
        if step in failing_steps and int(os.environ["PADDLE_TRAINER_ID"]) == rank:
            raise OSError(number, os.strerror(number), str(path))
        return write(path, relative, pieces)

    storage.write_safetensors = write_or_fail
    try:
        program.train(values, world)
    finally:
        storage.write_safetensors = write


def train_with_bytes_that_do_not_arrive(
    values: Mapping[str, Any], world: int, failing_steps: list[int], rank: int
) -> None:
    """Train; what ``rank`` writes of the checkpoints of these steps arrives with a bit flipped."""
    from ppfleetx.checkpoint import storage

    write = storage.write_safetensors

    def write_and_flip(path: Path, relative: str, pieces: Any) -> Any:
        written = write(path, relative, pieces)
        step = int(path.parent.parent.name.rsplit("_", 1)[1])
        if step in failing_steps and int(os.environ["PADDLE_TRAINER_ID"]) == rank:
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 1]))
        return written

    storage.write_safetensors = write_and_flip
    try:
        program.train(values, world)
    finally:
        storage.write_safetensors = write


def train_with_little_room(values: Mapping[str, Any], world: int, num_bytes: int) -> None:
    """Train where no file can grow beyond this size: the system refuses, not a double."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        program.train(values, world)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
