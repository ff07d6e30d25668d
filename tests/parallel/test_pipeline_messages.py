"""Pipeline messages: virtual stages on two ranks receive each message as its own kind, and no order of
messages deadlocks, even if each send waits for its receive."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import permutations
from typing import Any
from unittest import mock

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.helpers.ranks import Pools
from tests.parity.training import GLOBAL_BATCH, build, micro_batches, take_step

Messages = list[list[str]]
"""Groups of messages started together, each ``send`` or ``recv`` and what it is meant to carry."""


class Queue:
    """Groups of messages that a rank starts one group after the other, as under NCCL.

    A message is (``send`` or ``recv``, rank of the peer, what it is meant to carry).
    """

    def __init__(self, rank: int, groups: Iterable[Sequence[tuple[str, int, str]]]) -> None:
        self.rank, self._groups = rank, deque(groups)
        self.started: list[tuple[str, int, str]] = []

    def start_next_group(self) -> bool:
        if self.started or not self._groups:
            return False
        self.started = list(self._groups.popleft())
        return True

    def take(self, kind: str, peer: int) -> str:
        """End the first started message of this kind with ``peer``, and return its content."""
        first = next(message for message in self.started if message[:2] == (kind, peer))
        self.started.remove(first)
        return first[2]

    def has(self, kind: str, peer: int) -> bool:
        return any(message[:2] == (kind, peer) for message in self.started)


def replay(queues: Sequence[Queue]) -> list[tuple[str, str]]:
    """Match messages in order, where each send waits for its receive. Return the pairs (sent, received) of
    different contents. Raises AssertionError if the ranks wait for each other."""
    mistaken = []
    moved = True
    while moved:
        moved = False
        for queue in queues:
            moved |= queue.start_next_group()
        for sender, receiver in permutations(queues, 2):
            while sender.has("send", receiver.rank) and receiver.has("recv", sender.rank):
                pair = sender.take("send", receiver.rank), receiver.take("recv", sender.rank)
                mistaken += [pair] if pair[0] != pair[1] else []
                moved = True
    assert not any(queue.started for queue in queues), "the ranks wait for each other"
    return mistaken


@pytest.mark.parametrize("sends_first", [True, False])
def test_ranks_that_wait_for_each_other_are_found(sends_first: bool) -> None:
    """Both ranks send first: a gradient, and the input of the next forward pass."""
    first = [[("send", 1, "input")], [("recv", 1, "gradient")]]
    other = [[("send", 0, "gradient")], [("recv", 0, "input")]]
    queues = [Queue(0, first), Queue(1, other if sends_first else other[::-1])]
    with pytest.raises(AssertionError, match="wait for each other") if sends_first else nullcontext():
        assert replay(queues) == []


# -- two stages


def two_ranks(pools: Pools, chunks: int, micro_batches: int, **more: bool) -> list[Queue]:
    logs = pools.run(
        Plan(pp=2, virtual_pp_degree=chunks),
        "tests.parallel.test_pipeline_messages:messages",
        micro_batch_size=GLOBAL_BATCH // micro_batches,
        **more,
    )
    sent = [message for group in logs[0] for message in group].count("send activation")
    assert sent == 2 * chunks * micro_batches  # evaluated, then trained on
    return [
        Queue(rank, [[(text[:4], 1 - rank, text[5:]) for text in group] for group in log])
        for rank, log in enumerate(logs)
    ]


# With 2 micro batches Paddle runs all forward passes first; from 4 on it interleaves.
@pytest.mark.parametrize(("chunks", "micro_batches"), [(2, 2), (2, 4), (2, 8), (4, 4), (4, 16)])
def test_each_message_is_received_as_what_it_is(pools: Pools, chunks: int, micro_batches: int) -> None:
    assert replay(two_ranks(pools, chunks, micro_batches)) == []


def test_paddles_order_would_mistake_gradients_for_activations(pools: Pools) -> None:
    """If this fails after an upgrade, Paddle's order may do, and ours can go."""
    mistaken = replay(two_ranks(pools, 2, 8, paddles_order=True))
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
    queues = []
    for rank, log in enumerate(logs):
        ends = 1 if rank in (0, STAGES - 1) else 2
        assert len(log) == 2 * ends * MICRO_BATCHES
        started = [(kind, rank + STEP[side], "") for kind, side in log]
        peers = {peer for _, peer, _ in started} if overlaps else {None}
        queues += [Queue(rank, [[one] for one in started if peer in (one[1], None)]) for peer in peers]
    assert replay(queues) == []


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
