"""Process groups for Paddle's CPU build. Fleet's own tensor and pipeline parallel code runs on them
unmodified.

This backend is for development and continuous integration: Paddle's Gloo groups lack half of the operations
that fleet uses, and conflict with each other. With a CUDA build, ``install()`` does nothing, and NCCL is
used. ``docs/cpu_backend.md`` explains how the backend works and what it guarantees. ``patches.py`` lists
every attribute of Paddle that is replaced.
"""

from __future__ import annotations

import os
from typing import Any

import paddle

from ppfleetx.distributed.cpu.group import CpuProcessGroup
from ppfleetx.distributed.cpu.handshake import local_address
from ppfleetx.distributed.cpu.patches import apply_patches
from ppfleetx.distributed.cpu.transport import Mesh, time_limit
from ppfleetx.distributed.device import is_built_for_gpus
from ppfleetx.resilience.flight_recorder import OPERATIONS, RECORD

_mesh: Mesh | None = None
_creations: dict[int, int] = {}
_groups: list[CpuProcessGroup] = []


def install() -> bool:
    """Replace Paddle's "gloo" process groups with this module's. Must be called before ``fleet.init``;
    idempotent.

    Returns:
        Whether this module's groups are in use: False with a CUDA build, where nothing is replaced.
    """
    if is_built_for_gpus():
        return False
    os.environ.setdefault("PADDLE_DISTRI_BACKEND", "gloo")  # the launcher's default without GPUs
    apply_patches(create_process_group)
    return True


def traffic() -> dict[int, dict[str, Any]]:
    """Return this rank's communication since the start or the last :func:`reset_traffic`, by group id.

    Returns:
        ``{group id: {"ranks": [...], "operations": {name: {"calls", "payload", "sent"}}}}``. ``payload`` is
        the bytes passed to the operations. ``sent`` is the bytes that one rank sends in the textbook
        algorithm (n ranks; S = bytes of the whole tensor, which is the output of an all-gather, and the input
        of a reduce-scatter, scatter or all-to-all):

        ========================== =========================================
        all_reduce (ring)          2 (n-1)/n S
        all_gather, reduce_scatter (n-1)/n S
        all_to_all                 (n-1)/n S, or the bytes that leave the rank
        broadcast, reduce          (n-1)/n S (mean over the ranks: each but one receives, or sends, S)
        gather                     S/n, except at the destination
        scatter                    (n-1)/n S by the source
        send                       S
        ========================== =========================================

        The bytes on the wire differ: a small all-reduce is sent to all ranks at once, and only the source
        sends a broadcast.
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
    """Tell the other ranks that this rank ends. Called at exit of Python; call it yourself before
    ``os._exit``."""
    if _mesh is not None:
        _mesh.close()


def create_process_group(rank: int, size: int, group_id: int) -> CpuProcessGroup:
    """Create a process group. Replaces ``ProcessGroupGloo.create``.

    The first group is the default group: creating it is a collective of all ranks, which opens the
    connections. Later groups need no communication.
    """
    global _mesh
    if _mesh is None:
        env = paddle.distributed.ParallelEnv()
        _mesh = Mesh.connect(env.rank, env.world_size, address=local_address(), timeout=time_limit())
        RECORD.record_class(CpuProcessGroup, OPERATIONS)
        RECORD.blocked_on = lambda: _mesh.blocked_on
    generation = _creations[group_id] = _creations.get(group_id, 0) + 1
    group = CpuProcessGroup(_mesh, rank, size, group_id, generation)
    _groups.append(group)
    return group
