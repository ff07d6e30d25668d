"""The values of sharded parameters: stages 1 and 2 send new values in forward order, and all readers wait for
them. In stage 3 each owner sends a layer in one message, while the previous layer computes."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any
from unittest import mock

import paddle
import pytest
from paddle.base import core

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from ppfleetx.parallel import param_broadcast
from ppfleetx.parallel.param_broadcast import ParamBroadcast
from ppfleetx.parallel.zero3 import ParameterSharding
from tests.helpers.ranks import fields_of

GROUP = SimpleNamespace(id=1, rank=1, nranks=2, ranks=[0, 1])


def owned_by(owner_of):
    return SimpleNamespace(owner_of=owner_of, owns=lambda _: False, group_of=lambda _: GROUP)


def test_each_layer_waits_for_its_own(monkeypatch):
    """Small parameters come first, packed by owner, then large ones in the order of the layers."""
    layers, events = [paddle.nn.Linear(16, 16) for _ in range(3)], []
    names = {layer.weight.data_ptr(): f"weight {number}" for number, layer in enumerate(layers)}

    def broadcast(tensor, source, group, sync_op):
        name = names.get(tensor.data_ptr(), f"{tensor.size} small")
        events.append(f"send {name} from {source}")
        return SimpleNamespace(wait=lambda: events.append(f"have {name}"))

    monkeypatch.setattr("paddle.distributed.broadcast", broadcast)
    monkeypatch.setattr(param_broadcast, "SMALL_BYTES", 1000)
    parameters = [p for layer in layers for p in layer.parameters()]
    values = ParamBroadcast(parameters, owned_by(lambda p: int(p is layers[1].weight)), layers, 1 << 20)
    values.updated()
    sent = ["send 48 small from 0", "send weight 0 from 0", "send weight 1 from 1", "send weight 2 from 0"]
    assert events == sent
    for number, layer in enumerate(layers):
        events.clear()
        layer(paddle.ones([1, 16]))
        layer(paddle.ones([1, 16]))
        assert events == (["have 48 small"] if number == 0 else []) + [f"have weight {number}"]
    values.finish()
    values.updated()
    events.clear()
    values.finish()
    assert events == ["have 48 small", "have weight 0", "have weight 1", "have weight 2"]
    few = ParamBroadcast(parameters, owned_by(lambda _: 0), layers, packed_bytes=2 * 16 * 4)
    events.clear()
    few.updated()
    assert events[0] == "send 32 small from 0", "no more is packed than a bucket"
    assert len(events) == 1 + 1 + 3


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whoever_reads_after_a_step_gets_the_new_values(comparison, stage):
    """The stand-in broadcast fills its tensor only when it is waited for."""
    plan = fields_of(Plan(sharding=2, sharding_stage=stage))
    run = lambda overlaps: comparison.pools(2).run(  # noqa: E731
        "tests.parallel.test_param_broadcast:read_after_steps", plan=plan, overlaps=overlaps
    )
    overlapped, waited = run(True), run(False)
    assert overlapped == waited
    assert all(len(set(map(str, rank.values()))) == len(rank) for rank in waited), "each step changes them"


@pytest.mark.parametrize("stage", [1, 2])
def test_what_a_step_reads_waits_for_no_new_values(comparison, stage):
    """Otherwise a GPU would receive all values before the forward pass, and nothing would overlap."""
    plan = fields_of(Plan(sharding=2, sharding_stage=stage))
    target = "tests.parallel.test_param_broadcast:under_way_between_steps"
    for updated, read in comparison.pools(2).run(target, plan=plan):
        assert min(updated) > 0 and read == updated


# -- stage 3

LAYERS, WIDTH = 5, 64
OWNED_ELSEWHERE = owned_by(lambda _: 0)


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

    monkeypatch.setattr("paddle.distributed.broadcast", broadcast)
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


# -- in the ranks


def read_after_steps(plan: dict[str, Any], overlaps: bool) -> dict[str, list[float]]:
    """The values that each reader finds; a broadcast fills its tensor only when it is waited for."""
    import paddle
    from paddle import distributed

    from ppfleetx.core.engine.saving import Saver
    from ppfleetx.generation.decoding_session import NextTokenModel
    from ppfleetx.resilience.flight_recorder import RECORD
    from tests.parity.training import VOCAB, build, micro_batches, take_step

    send = distributed.broadcast

    def late(tensor: paddle.Tensor, src: int, group: Any = None, sync_op: bool = True) -> Any:
        arrived = tensor.clone()
        task = send(arrived, src, group=group, sync_op=sync_op)
        is_mine = distributed.get_rank() == src

        def wait() -> None:
            task.wait()
            with paddle.no_grad():
                if not is_mine:
                    paddle.assign(arrived, tensor)

        if sync_op:
            wait()
        return SimpleNamespace(wait=wait)

    def logits(model: Any, batch: dict[str, paddle.Tensor]) -> paddle.Tensor:
        return model(batch["tokens"])

    def total(tensors: Any) -> list[float]:
        return [float(tensor.astype("float64").abs().sum()) for tensor in tensors]

    extra = {"Model.num_layers": 2, "Distributed.sharding.broadcast_overlap": overlaps}
    with paddle.utils.unique_name.guard(), mock.patch.object(distributed, "broadcast", late):
        cfg, ctx, runner = build(plan, 2, "gpt", "adamw", 4, extra)
        batches = micro_batches(9, cfg, ctx)
        saver = SimpleNamespace(_trained_alone=False)
        readers = {
            "parameters": lambda: total(p for _, p in runner.named_parameters()),
            "evaluation": lambda: list(runner.eval_step(batches)),
            "computation": lambda: [float(abs(a).sum()) for a in runner.compute(logits, batches)],
            "checkpoint": lambda: [_sum(s.data) for s in Saver._tensors(saver, runner)],
        }
        if plan.get("sharding_stage", 1) < 3:  # of stage 3 no rank has the values
            readers["generation"] = lambda: total([NextTokenModel(runner.model, VOCAB).head_matrix])
            readers["model"] = lambda: total(runner.model.parameters())
        found = {}
        for step, (name, read) in enumerate(readers.items()):
            take_step(runner, step, cfg, ctx)
            sent = [call for call in RECORD.calls if call.operation == "broadcast"]
            assert sent and all(call.task is not None for call in sent), "the hang report knows them"
            found[name] = read()
        runner.finish_update()
    return found


def under_way_between_steps(plan: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The broadcasts in progress after each update, and after the exchange of counts for the next step.

    The device pretends to be a GPU: ``Tensor.numpy`` waits for all streams, and pinned memory is filled only
    after an event behind its copy was waited for.
    """
    import paddle
    from paddle.base import core

    from ppfleetx.core.engine.rank_consistency import RankConsistency
    from ppfleetx.distributed import host_device_copy
    from ppfleetx.resilience.stop_request import StopRequest
    from tests.parity.training import build, micro_batches, take_step

    copies: list[tuple[paddle.Tensor, paddle.Tensor]] = []
    pinned: set[int] = set()
    to_numpy = paddle.Tensor.numpy

    def copy_to_host(tensor: paddle.Tensor) -> paddle.Tensor:
        copies.append((tensor, paddle.zeros_like(tensor)))
        pinned.add(id(copies[-1][1]))
        return copies[-1][1]

    class Event:
        def __init__(self) -> None:
            self.behind = len(copies)

        def query(self) -> bool:
            for tensor, copy in copies[: self.behind]:
                paddle.assign(tensor, copy)
            return True

    cfg, ctx, runner = build(plan, 2, "gpt", "adamw", 4, {"Model.num_layers": 2, "Engine.checks": "cheap"})
    values = runner._sync._values

    def numpy(tensor: paddle.Tensor) -> Any:
        if id(tensor) not in pinned:
            values.finish()
        return to_numpy(tensor)

    watch, counts = RankConsistency(cfg, ctx, 1e6, runner.count), ([], [])
    with (
        mock.patch.object(host_device_copy, "on_card", lambda: True),
        mock.patch.object(core.Place, "is_cpu_place", lambda _: False),
        mock.patch.object(host_device_copy, "_queue", paddle.to_tensor),
        mock.patch.object(host_device_copy, "queue_copy_to_host", copy_to_host),
        mock.patch.object(host_device_copy, "recorded_event", Event),
        mock.patch.object(paddle.Tensor, "numpy", numpy),
    ):
        for step in range(2):
            take_step(runner, step, cfg, ctx)
            counts[0].append(len(values._tasks) + len(values._packed))
            stop = watch.before_step(micro_batches(step + 1, cfg, ctx), None, StopRequest(), step + 1)
            assert not stop and watch.counts[0] > 1, "what was read is not what was sent"
            counts[1].append(len(values._tasks) + len(values._packed))
    runner.finish_update()
    return counts


def _sum(data: Any) -> float:
    return float(abs(data() if callable(data) else data).sum())
