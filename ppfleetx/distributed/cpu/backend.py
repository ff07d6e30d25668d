"""Process groups for Paddle's CPU build, for development and continuous integration. Fleet's tensor-parallel
and pipeline-parallel code runs on these groups unmodified.

``docs/cpu_backend.md`` lists the guarantees. ``patches.py`` lists every attribute of Paddle that is replaced.
"""

from __future__ import annotations

import os
from typing import Any

import paddle

from ppfleetx.distributed.cpu.group import CpuProcessGroup
from ppfleetx.distributed.cpu.handshake import local_address
from ppfleetx.distributed.cpu.patches import apply_patches
from ppfleetx.distributed.cpu.transport import Connections, time_limit
from ppfleetx.distributed.device import is_built_for_gpus
from ppfleetx.resilience.flight_recorder import OPERATIONS, RECORD

_mesh: Connections | None = None
_creations: dict[int, int] = {}
_groups: list[CpuProcessGroup] = []


def install() -> bool:
    """Make Paddle create the process groups of this module instead of its own. Call this before
    ``fleet.init``. With a CUDA build of Paddle, this replaces nothing and returns False; otherwise it returns
    True."""
    if is_built_for_gpus():
        return False
    os.environ.setdefault("PADDLE_DISTRI_BACKEND", "gloo")  # the launcher's default without GPUs
    apply_patches(create_process_group)
    return True


def traffic() -> dict[int, dict[str, Any]]:
    """Return how much this rank has communicated in each process group since the start, or since the last
    call of :func:`reset_traffic`.

    Returns:
        ``{group id: {"ranks": [...], "operations": {name: {"calls", "payload", "sent"}}}}``. ``payload`` is
        the sum of S over all calls, where S is the size of the tensor in bytes. If the ranks gather or
        scatter parts of a tensor, S is the size of all parts together. ``sent`` is the sum of the bytes that
        this rank would send with the textbook algorithm among n ranks:

        ========================== ==========================================================
        all_reduce (ring)          2 (n-1)/n S
        all_gather, reduce_scatter (n-1)/n S
        all_to_all                 S without the part that the rank keeps
        broadcast, reduce          (n-1)/n S: the mean over the ranks
        gather                     S/n; 0 on the destination
        scatter                    (n-1)/n S on the source; 0 on the other ranks
        send                       S
        ========================== ==========================================================
    """
    return {
        group.group_id: {
            "ranks": list(group.ranks),
            "operations": {k: dict(v) for k, v in group.counts.items()},
        }
        for group in _groups
        if group.counts
    }


def reset_traffic() -> None:
    for group in _groups:
        group.counts.clear()


def close() -> None:
    """Tell the other ranks that this rank ends. Python does this at exit, but not if the process ends with
    ``os._exit``."""
    if _mesh is not None:
        _mesh.close()


def create_process_group(rank: int, size: int, group_id: int) -> CpuProcessGroup:
    """Create a process group of CPU tensors, in place of Paddle's ``ProcessGroupGloo.create``. The first call
    also connects the ranks of the job, so all ranks must make their first call together."""
    global _mesh
    if _mesh is None:
        env = paddle.distributed.ParallelEnv()
        _mesh = Connections.connect(env.rank, env.world_size, address=local_address(), timeout=time_limit())
        RECORD.record_class(CpuProcessGroup, OPERATIONS)
        RECORD.blocked_on = lambda: _mesh.blocked_on
    generation = _creations[group_id] = _creations.get(group_id, 0) + 1
    group = CpuProcessGroup(_mesh, rank, size, group_id, generation)
    _groups.append(group)
    return group
