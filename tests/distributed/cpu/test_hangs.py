"""When a job hangs, the joined reports of the ranks say which rank is missing, and where."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import paddle
import paddle.distributed as dist
import pytest

from ppfleetx.distributed import coordination
from ppfleetx.resilience import watchdog
from ppfleetx.resilience.flight_recorder import RECORD
from ppfleetx.resilience.hang_diagnosis import explain
from ppfleetx.resilience.hang_report import Identity, read_reports
from ppfleetx.resilience.progress import PROGRESS
from tests.distributed.cpu.cases import start

CASES = "tests.distributed.cpu.test_hangs:"
PATIENCE = 1.0


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "stop",
            r"rank 0 waits in all_reduce #\d+ of group 0 \[0, 1\] \(shape \[2, 2\], float32\); rank 1 never "
            r"arrived and wrote no report: its process is stopped \(SIGSTOP or Ctrl-Z\) \(step 3\)",
        ),
        (
            "beside",
            r"rank 1 waits in all_gather #\d+ of group 0 \[0, 1\] .*; rank 0 never arrived: it is in its "
            r"step \(test_hangs\.py:\d+ in _wait_for_ever, in thread first-on-node_0\) \(step 3\)",
        ),
        (
            "order",
            r"rank 0 waits in all_reduce #0 of group (\d+) \[0, 1\] .*, rank 1 waits in all_reduce #0 of "
            r"group (?!\1)\d+ \[0, 1\] .*, so each waits for the other; the last that both called was "
            r"all_reduce #\d+ of group 0 \[0, 1\]; the ranks do not run the same operations in",
        ),
    ],
)
def test_a_halt_is_explained_by_those_that_are_left(pools, tmp_path, kind, said):
    pool = pools(2)
    first = pool.call(CASES + "halt", kind=kind, directory=str(tmp_path), patience=PATIENCE, timeout=10)[0]
    assert first.died  # with exit code 4; what it said is in the file
    sentence = (tmp_path / "summary.txt").read_text()
    assert re.fullmatch(said + ".*\n", sentence), sentence
    reports = read_reports(tmp_path)
    assert explain(reports).sentence == sentence.strip()
    assert [report.rank for report in reports.values()] == ([0] if kind == "stop" else [0, 1])
    assert "halt" in (tmp_path / "rank_00000.txt").read_text()


def test_a_rank_that_works_is_waited_for(pools, tmp_path):
    outcomes = pools(2).run(CASES + "halt", kind="slow", directory=str(tmp_path), patience=PATIENCE, slow=2.5)
    assert outcomes == ["went on"] * 2
    assert sorted(read_reports(tmp_path)) == [0, 1]
    assert explain(read_reports(tmp_path)).goes_on == (1,)


def test_calls_are_recorded_with_number_shape_and_peer(pools):
    common = [
        ["all_reduce", 0, [2, 3], -1, True],
        ["all_gather", 1, [4], -1, True],
        ["broadcast", 2, [1], -1, True],
    ]
    assert pools(2).run(CASES + "recorded") == [
        [*common, ["send", 0, [7], 1, True]],
        [*common, ["recv", 0, [7], 0, True]],
    ]


# -- in the ranks, under a watchdog -----------------------------------------------------------------

EXIT = 4


def halt(kind: str, directory: str, patience: float, slow: float = 0.0) -> str:
    """Rank 1 hangs or deviates. The process exits with code 4, unless rank 1 is only slow."""
    start()
    rank, groups = dist.get_rank(), [dist.new_group([0, 1]), dist.new_group([0, 1])]
    limits = watchdog.Limits(timeout=patience, start_timeout=patience)
    watchdog.begin(Identity(rank, 2), limits, Path(directory), end=lambda: os._exit(EXIT))
    own = [watchdog.own_process()]
    others: list = []
    dist.all_gather_object(others, own)
    watchdog.remember_peers({number: one[0] for number, one in enumerate(others)})
    PROGRESS.is_past_start = True
    for step in range(1, 4):
        PROGRESS.beat("in its step", step)
        dist.all_reduce(paddle.ones([3]))
    if kind == "order":
        for group in groups if rank == 0 else reversed(groups):
            dist.all_reduce(paddle.ones([5]), group=group)
    if kind == "beside":  # signs of life are exchanged meanwhile, and are no progress
        coordination._BEAT_SECONDS = patience / 4
        coordination.first_on_each_node(SimpleNamespace(world_size=2), _wait_for_ever)
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
    """The calls in this rank's flight recorder."""
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
