"""This process's place in its job, from the environment variables that Paddle's launcher sets. Without a
launcher, a process is rank 0 of 1."""

from __future__ import annotations

import os


def is_rank() -> bool:
    """Return whether this process is a rank of a job that a launcher has started."""
    return "PADDLE_TRAINER_ID" in os.environ


def rank() -> int:
    return int(os.environ.get("PADDLE_TRAINER_ID") or 0)


def world_size() -> int:
    return int(os.environ.get("PADDLE_TRAINERS_NUM") or 1)


def local_rank() -> int:
    """Return this rank's number on its node."""
    return int(os.environ.get("PADDLE_LOCAL_RANK") or rank())


def local_size() -> int:
    """Return the number of ranks on this node; 0 if the launcher does not say it."""
    return int(os.environ.get("PADDLE_LOCAL_SIZE") or 0)
