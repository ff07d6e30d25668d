"""Virtual stages on two pipeline ranks: each message is received as its own kind, without deadlock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.helpers.ranks import Pools
from tests.parallel.message_log import Messages
from tests.parity.training import GLOBAL_BATCH


def logs(pools: Pools, chunks: int, micro_batches: int, **more: bool) -> list[Messages]:
    plan = Plan(pp=2, virtual_pp_degree=chunks)
    return pools.run(
        plan,
        "tests.parallel.message_log:messages",
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


def test_ranks_that_wait_for_each_other_are_found() -> None:
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
