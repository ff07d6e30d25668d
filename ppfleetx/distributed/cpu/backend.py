"""Process groups for the CPU build of Paddle, on which fleet's own tensor and pipeline code runs unmodified.

A backend for development and continuous integration: Paddle's Gloo groups lack half of the operations
fleet uses and collide with each other. On a build with CUDA ``install()`` does nothing and NCCL does the
work. ``docs/cpu_backend.md`` tells how it works, what it promises and what is in which file;
``patches.py`` lists every attribute of Paddle that is replaced.
"""

from __future__ import annotations

import os

from ppfleetx.distributed.cpu.job import close, reset_traffic, traffic
from ppfleetx.distributed.cpu.patches import apply_patches
from ppfleetx.distributed.device import is_built_for_gpus

__all__ = ["close", "install", "reset_traffic", "traffic"]


def install() -> bool:
    """Make Paddle's "gloo" process groups those of this module. Call before ``fleet.init``; idempotent.

    Returns:
        Whether it is in force: False on a build with CUDA, where nothing is touched.
    """
    if is_built_for_gpus():
        return False
    os.environ.setdefault("PADDLE_DISTRI_BACKEND", "gloo")  # as the launcher does where there are no cards
    apply_patches()
    return True
