"""Run in the ranks for test_hangs.py: they hang under a watchdog."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import paddle
import paddle.distributed as dist

from ppfleetx.distributed import together
from ppfleetx.resilience import watchdog
from ppfleetx.resilience.activity import PROGRESS
from ppfleetx.resilience.flight_recorder import RECORD
from ppfleetx.resilience.hang_report import Identity
from tests.distributed.cpu.cases import start

EXIT = 4


def halt(kind: str, directory: str, patience: float, slow: float = 0.0) -> str:
    """Rank 1 hangs or deviates; the process exits with code 4, unless rank 1 is only slow."""
    start()
    rank, groups = dist.get_rank(), [dist.new_group([0, 1]), dist.new_group([0, 1])]
    local = Path(directory, "local")  # for copies of the reports
    local.mkdir(exist_ok=True)
    tempfile.tempdir, watchdog._RAM = str(local), local
    limits = watchdog.Limits(timeout=patience, start_timeout=patience)
    watchdog.begin(Identity(rank, 2), limits, Path(directory), end=lambda: os._exit(EXIT))
    own = [watchdog.Peers.own()]
    others: list = []
    dist.all_gather_object(others, own)
    watchdog.remember_peers({number: one[0] for number, one in enumerate(others)})
    PROGRESS.is_under_way = True
    for step in range(1, 4):
        PROGRESS.beat("in its step", step)
        dist.all_reduce(paddle.ones([3]))
    if kind == "order":
        for group in groups if rank == 0 else reversed(groups):
            dist.all_reduce(paddle.ones([5]), group=group)
    if kind == "beside":  # signs of life are exchanged meanwhile, and are no progress
        together._BEAT_SECONDS = patience / 4
        together.first_on_each_node(SimpleNamespace(world_size=2), _wait_for_ever)
    if rank == 1:
        PROGRESS.beat("reading data")
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            _compute(slow)
    dist.all_reduce(paddle.ones([2, 2]))
    watchdog.finish()
    return "went on"


def _wait_for_ever() -> None:
    threading.Event().wait()


def _compute(seconds: float) -> None:
    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10000))


def recorded() -> list:
    """The calls that this rank's flight recorder holds."""
    start()
    group = dist.new_group([0, 1])
    RECORD.calls.clear()
    dist.all_reduce(paddle.ones([2, 3]), group=group)
    parts: list = []
    dist.all_gather(parts, paddle.ones([4], "int64"), group=group)
    task = dist.broadcast(paddle.ones([1]), 0, group=group, sync_op=False)
    task.wait()
    if dist.get_rank() == 0:
        dist.send(paddle.ones([7]), 1, group=group)
    else:
        dist.recv(paddle.ones([7]), 0, group=group)
    return [[call.operation, call.number, list(call.shape), call.peer, call.is_done] for call in RECORD.calls]
