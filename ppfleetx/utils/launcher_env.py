"""This process's rank and the sizes of its job, from the environment variables that Paddle's launcher sets.
Without a launcher, a process is rank 0 of 1."""

from __future__ import annotations

import os

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.reading.tree import is_index

# Launchers that Paddle does not know: the variables with the number of processes and with a process's number.
_OTHERS = {
    "torchrun": ("WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpiexec": ("PMI_SIZE", "PMI_RANK"),
    "msrun": ("MS_WORKER_NUM", "MS_NODE_ID"),
}


def refuse_other_launchers() -> None:
    """Raise ConfigError if a launcher such as torchrun or srun has started this process along with others.
    Paddle would not connect them, so each would train alone."""
    if "PADDLE_TRAINERS_NUM" in os.environ:
        return
    for launcher, (variable, number) in _OTHERS.items():
        count = os.environ.get(variable, "")
        if number in os.environ and is_index(count) and int(count) > 1:
            raise ConfigError(
                f"{launcher} started {count} processes, which Paddle does not connect, so each would train "
                "alone. Start one process on each machine, python -m paddle.distributed.launch or ppfleetx "
                "train --nproc N; if each process is to be a run of its own, set PADDLE_TRAINERS_NUM=1",
                key=variable,
                value=int(count),
                place="environment",
            )


def is_rank() -> bool:
    """Return whether this process is a rank of a job that a launcher has started."""
    return "PADDLE_TRAINER_ID" in os.environ


def rank() -> int:
    """Return this process's rank in its job. This function and those below raise ConfigError if an
    environment variable is not a number."""
    return _number("PADDLE_TRAINER_ID", 0)


def world_size() -> int:
    return _number("PADDLE_TRAINERS_NUM", 1)


def local_rank() -> int:
    """Return this rank's index among the ranks on its node."""
    return _number("PADDLE_LOCAL_RANK", rank())


def local_size() -> int:
    """Return the number of ranks on this node; 0 if the launcher does not set it."""
    return _number("PADDLE_LOCAL_SIZE", 0)


def _number(variable: str, default: int) -> int:
    value = os.environ.get(variable, str(default))
    if not is_index(value):
        raise ConfigError("is not a number", key=variable, value=value, place="environment")
    return int(value)
