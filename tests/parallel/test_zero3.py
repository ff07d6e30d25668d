"""Sharding stage 3: each owner sends a layer in one message, while the previous layer computes."""

import gc
from types import SimpleNamespace

import paddle
import pytest
from paddle.base import core

from ppfleetx.parallel import sharded_values
from ppfleetx.parallel.sharded_values import ParameterSharding

LAYERS, WIDTH = 5, 64
GROUP = SimpleNamespace(id=1, rank=1, nranks=2, ranks=[0, 1])
OWNED_ELSEWHERE = SimpleNamespace(owner_of=lambda _: 0, owns=lambda _: False, group_of=lambda _: GROUP)


class Block(paddle.nn.Layer):
    """``state[0] W + b``; the size of ``b`` identifies the block in recorded messages."""

    def __init__(self, number, mark):
        super().__init__()
        self.number, self.mark = number, mark
        self.weight = self.create_parameter([WIDTH, WIDTH])
        self.bias = self.create_parameter([WIDTH])
        self.size_of_mine = self.create_parameter([64 * (number + 1)])

    def forward(self, state):
        self.mark(f"compute {self.number}")
        assert self.bias.tolist() == [self.number] * WIDTH, "the values of another layer"
        return (state[0] @ self.weight + self.bias, *state[1:])


@pytest.fixture
def events(monkeypatch):
    """A list of events. Stand-in messages bring zeros, and the number of their block as its bias."""
    log = []

    def broadcast(flat, source, group, sync_op):
        number = (flat.size - WIDTH * WIDTH - WIDTH) // 64 - 1
        log.append(f"send {number}")

        def wait():
            log.append(f"have {number}")
            flat.zero_()
            flat._slice(WIDTH * WIDTH, WIDTH * WIDTH + WIDTH).fill_(number)

        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(sharded_values.distributed, "broadcast", broadcast)
    return log


def _run(blocks):
    state = (paddle.ones([2, WIDTH]), paddle.zeros([1]))
    state[0].stop_gradient = False
    for block in blocks:
        state = block(state)
    state[0].sum().backward()


def test_the_next_layer_is_fetched_while_one_computes(events):
    blocks = [Block(number, events.append) for number in range(3)]
    values = ParameterSharding(OWNED_ELSEWHERE, list(enumerate(blocks)))
    assert not any(p._is_initialized() for block in blocks for p in block.parameters())
    _run(blocks)
    assert events == [
        *("send 0", "have 0", "send 1", "compute 0", "have 1", "send 2", "compute 1", "have 2", "compute 2"),
        *("send 2", "have 2", "send 1", "have 1", "send 0", "have 0"),
    ]
    assert not any(p._is_initialized() for block in blocks for p in block.parameters())
    assert all(block.weight.grad is not None for block in blocks)
    events.clear()
    blocks[0]((paddle.ones([2, WIDTH]),))  # and no more: what was fetched for the next may be out of date
    values.updated()
    with paddle.no_grad():
        blocks[1]((paddle.ones([2, WIDTH]),))
    assert events == [
        *("send 0", "have 0", "send 1", "compute 0", "have 1"),
        *("send 1", "have 1", "send 2", "compute 1"),
    ]


def test_layers_of_different_chunks_are_not_fetched_ahead(events):
    """On a pipeline rank, another micro batch or the backward pass may come between them."""
    blocks = [Block(number, events.append) for number in range(2)]
    ParameterSharding(OWNED_ELSEWHERE, [(1, blocks[0]), (5, blocks[1])])
    _run(blocks)
    assert events[:4] == ["send 0", "have 0", "compute 0", "send 1"]


def test_one_layer_more_exists(events):
    def peak(ahead):
        blocks = [Block(number, lambda _: None) for number in range(LAYERS)]
        ParameterSharding(OWNED_ELSEWHERE, list(enumerate(blocks)), ahead=ahead)
        gc.collect()  # nothing of other tests is freed while this one counts
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        before = core.host_memory_stat_current_value("Allocated", 0)
        with paddle.no_grad():
            state = (paddle.ones([1, WIDTH]),)
            for block in blocks:
                state = block(state)
        return core.host_memory_stat_peak_value("Allocated", 0) - before

    largest = 4 * (WIDTH * WIDTH + WIDTH + 64 * LAYERS)
    assert largest / 2 < peak(True) - peak(False) <= largest
