"""Pipeline messages: virtual stages on two ranks receive each message as its own kind, and no order of
messages deadlocks, even if each send waits for its receive."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.helpers.ranks import Pools
from tests.parity.training import GLOBAL_BATCH, build, micro_batches, take_step

Messages = list[list[str]]
"""Groups of messages started together, each ``send`` or ``recv`` and what it is meant to carry."""


# -- two stages


def logs(pools: Pools, chunks: int, micro_batches: int, **more: bool) -> list[Messages]:
    plan = Plan(pp=2, virtual_pp_degree=chunks)
    return pools.run(
        plan,
        "tests.parallel.test_pipeline_messages:messages",
        micro_batch_size=GLOBAL_BATCH // micro_batches,
        **more,
    )


@dataclass
class Rank:
    """A rank as under NCCL: it runs groups of messages one after the other."""

    groups: deque[list[str]]
    sends: deque[str] = field(default_factory=deque)
    receives: deque[str] = field(default_factory=deque)

    def open_next_group(self) -> bool:
        if self.sends or self.receives or not self.groups:
            return False
        for message in self.groups.popleft():
            kind, _, content = message.partition(" ")
            (self.sends if kind == "send" else self.receives).append(content)
        return True


def replay(logs: list[Messages]) -> list[tuple[str, str]]:
    """Match the messages of two ranks in order, where each send waits for its receive. Return the pairs
    (sent, received) of different kinds. Raises AssertionError if the ranks wait for each other."""
    ranks = [Rank(deque(log)) for log in logs]
    mistaken = []
    while any(rank.groups or rank.sends or rank.receives for rank in ranks):
        moved = [rank.open_next_group() for rank in ranks]
        for sender, receiver in (ranks, reversed(ranks)):
            while sender.sends and receiver.receives:
                pair = sender.sends.popleft(), receiver.receives.popleft()
                mistaken += [pair] if pair[0] != pair[1] else []
                moved.append(True)
        assert any(moved), f"the ranks wait for each other: {ranks}"
    return mistaken


def test_two_ranks_that_wait_for_each_other_are_found() -> None:
    with pytest.raises(AssertionError, match="wait for each other"):
        replay([[["recv gradient"], ["send gradient"]]] * 2)


# With 2 micro batches Paddle runs all forward passes first; from 4 on it interleaves.
@pytest.mark.parametrize(("chunks", "micro_batches"), [(2, 2), (2, 4), (2, 8), (4, 4), (4, 16)])
def test_each_message_is_received_as_what_it_is(pools: Pools, chunks: int, micro_batches: int) -> None:
    both = logs(pools, chunks, micro_batches)
    sent = [message for group in both[0] for message in group].count("send activation")
    assert sent == 2 * chunks * micro_batches  # evaluated, then trained on
    assert replay(both) == []


def test_paddles_order_would_mistake_gradients_for_activations(pools: Pools) -> None:
    """If this fails after an upgrade, Paddle's order may do, and ours can go."""
    mistaken = replay(logs(pools, 2, 8, paddles_order=True))
    assert {("gradient", "activation"), ("activation", "gradient")} == set(mistaken)


def test_paddle_still_refuses_two_stages() -> None:
    from paddle.distributed.fleet.meta_parallel import pipeline_parallel

    class Two:
        num_stages, accumulate_steps = 2, 8

    for name in ("PipelineParallelWithInterleave", "PipelineParallelWithInterleaveFthenB"):
        with pytest.raises(AssertionError, match="pp degree > 2"):
            getattr(pipeline_parallel, name)._check_sanity(Two())


# -- schedules that are executed from a list

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
        "tests.parallel.test_pipeline_messages:starts",
        timeout=180.0,
        micro_batch_size=GLOBAL_BATCH // MICRO_BATCHES,
        extra={"Model.num_layers": STAGES, "Distributed.overlap_p2p_comm": overlaps},
    )
    logs = [[tuple(start) for start in log] for log in logs]
    for rank, log in enumerate(logs):
        ends = 1 if rank in (0, STAGES - 1) else 2
        assert len(log) == 2 * ends * MICRO_BATCHES
    assert left_over(logs, one_queue=not overlaps) == {}


# -- in the ranks


def messages(
    plan: dict[str, Any], world_size: int, micro_batch_size: int, paddles_order: bool = False
) -> Messages:
    """Messages of an evaluation and a training step; with ``paddles_order``, Paddle's helper replaces
    ours."""
    import paddle
    from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication as p2p

    log: Messages = []
    exchange = p2p._batched_p2p_ops

    def logged_exchange(send_prev: Any, recv_prev: Any, send_next: Any, recv_next: Any, hcg: Any) -> None:
        # Sends and receives in the order in which Paddle starts them.
        directions = [
            ("send gradient", send_prev),
            ("recv activation", recv_prev),
            ("send activation", send_next),
            ("recv gradient", recv_next),
        ]
        log.append([what for what, tensors in directions if tensors is not None])
        exchange(send_prev, recv_prev, send_next, recv_next, hcg)

    def logged_meta(way: str) -> Any:
        act = getattr(p2p.SendRecvMeta, f"{way}_meta")

        def logged(*args: Any, **kwargs: Any) -> None:
            log.extend([[f"{way} size"], [f"{way} shape"]])
            act(*args, **kwargs)

        return mock.patch.object(p2p.SendRecvMeta, f"{way}_meta", logged)

    with paddle.utils.unique_name.guard():
        cfg, ctx, runner = build(plan, world_size, "gpt", "sgd", micro_batch_size, {})
        if paddles_order:
            runner._pipeline._p2p_helper = p2p.P2pHelper(use_cache=True)
        logged = mock.patch.object(p2p, "_batched_p2p_ops", logged_exchange)
        with logged, logged_meta("send"), logged_meta("recv"):
            runner.eval_step(micro_batches(0, cfg, ctx))
            take_step(runner, 0, cfg, ctx)
    return [group for group in log if group]


def starts(
    plan: dict[str, Any], world_size: int, micro_batch_size: int, extra: dict[str, Any]
) -> list[tuple[str, str]]:
    """The messages of the second training step, in order: (``send`` or ``recv``, ``prev`` or ``next``
    neighbor). Shapes are exchanged only in the first step."""
    import paddle
    from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication as p2p

    log: list[tuple[str, str]] = []
    start = p2p._p2p_ops

    def logged(send_prev: Any, recv_prev: Any, send_next: Any, recv_next: Any, hcg: Any) -> Any:
        what = {
            ("recv", "prev"): recv_prev,
            ("send", "prev"): send_prev,
            ("send", "next"): send_next,
            ("recv", "next"): recv_next,
        }
        log.extend(key for key, tensors in what.items() if tensors is not None)
        return start(send_prev, recv_prev, send_next, recv_next, hcg)

    with paddle.utils.unique_name.guard():
        cfg, ctx, runner = build(plan, world_size, "gpt", "sgd", micro_batch_size, extra)
        take_step(runner, 0, cfg, ctx)
        with mock.patch.object(p2p, "_p2p_ops", logged):
            take_step(runner, 1, cfg, ctx)
    return log
