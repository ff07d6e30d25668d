"""Asynchronous pipeline messages cannot deadlock, even if each send waits for its receive."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.helpers.ranks import Pools
from tests.parity.training import GLOBAL_BATCH

MICRO_BATCHES = 8
STAGES = 4
STEP = {"prev": -1, "next": 1}
Start = tuple[str, str]


def left_over(logs: list[list[Start]], *, one_queue: bool) -> dict[tuple[int, int], list[Start]]:
    """Messages that remain unmatched if each rank runs its messages one after the other; with ``one_queue``
    False, only those with the same neighbor are in order."""
    queues: dict[tuple[int, int], deque[tuple[int, Start]]] = defaultdict(deque)
    for rank, log in enumerate(logs):
        for kind, side in log:
            peer = rank + STEP[side]
            queues[rank, -1 if one_queue else peer].append((peer, (kind, side)))
    heads = lambda rank: [q for (owner, _), q in queues.items() if owner == rank and q]  # noqa: E731
    moved = True
    while moved:
        moved = False
        for rank in range(len(logs)):
            for mine in heads(rank):
                for theirs in heads(mine[0][0]):
                    if theirs[0][0] == rank and {mine[0][1][0], theirs[0][1][0]} == {"send", "recv"}:
                        mine.popleft(), theirs.popleft()
                        moved = True
                        break
                if moved:
                    break
    return {key: [start for _, start in queue] for key, queue in queues.items() if queue}


def test_ranks_that_wait_for_each_other_are_found() -> None:
    """Both ranks send first: a gradient, and the input of the next forward pass."""
    logs = [[("send", "next"), ("recv", "next")], [("send", "prev"), ("recv", "prev")]]
    assert left_over(logs, one_queue=True)
    logs[1].reverse()
    assert not left_over(logs, one_queue=True)


@pytest.mark.parametrize(("schedule", "overlaps"), [("zb_h1", False), ("zb_h1", True), ("1f1b", True)])
def test_all_messages_meet(pools: Pools, schedule: str, overlaps: bool) -> None:
    """Without ``overlap_p2p_comm``, all messages of a rank are in order; with it, those of each pair of
    ranks, as with NCCL."""
    plan = Plan(pp=STAGES, pp_schedule=schedule)
    logs = pools.run(
        plan,
        "tests.parallel.message_log:starts",
        timeout=180.0,
        micro_batch_size=GLOBAL_BATCH // MICRO_BATCHES,
        extra={"Model.num_layers": STAGES, "Distributed.overlap_p2p_comm": overlaps},
    )
    logs = [[tuple(start) for start in log] for log in logs]
    for rank, log in enumerate(logs):
        ends = 1 if rank in (0, STAGES - 1) else 2
        assert len(log) == 2 * ends * MICRO_BATCHES
    assert left_over(logs, one_queue=not overlaps) == {}
