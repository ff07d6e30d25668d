"""Stages 1 and 2: values of an update leave in the order of the forward pass, and readers wait."""

from types import SimpleNamespace

import paddle
import pytest

from ppfleetx.config.plan import ParallelPlan as Plan
from ppfleetx.parallel import param_broadcast
from ppfleetx.parallel.param_broadcast import NewValues
from tests.helpers.ranks import fields_of

GROUP = SimpleNamespace(id=1, rank=1, nranks=2, ranks=[0, 1])


def owned_by(owner_of):
    return SimpleNamespace(owner_of=owner_of, group_of=lambda _: GROUP)


def test_each_layer_waits_for_its_own(monkeypatch):
    """Small ones first and packed, by owner; large ones into their memory, in the order of the layers."""
    layers, events = [paddle.nn.Linear(16, 16) for _ in range(3)], []
    names = {layer.weight.data_ptr(): f"weight {number}" for number, layer in enumerate(layers)}

    def broadcast(tensor, source, group, sync_op):
        name = names.get(tensor.data_ptr(), f"{tensor.size} small")
        events.append(f"send {name} from {source}")
        return SimpleNamespace(wait=lambda: events.append(f"have {name}"))

    monkeypatch.setattr(param_broadcast.distributed, "broadcast", broadcast)
    monkeypatch.setattr(param_broadcast, "SMALL_BYTES", 1000)
    parameters = [p for layer in layers for p in layer.parameters()]
    values = NewValues(parameters, owned_by(lambda p: int(p is layers[1].weight)), layers, 1 << 20)
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
    few = NewValues(parameters, owned_by(lambda _: 0), layers, packed_bytes=2 * 16 * 4)
    events.clear()
    few.updated()
    assert events[0] == "send 32 small from 0", "no more is packed than a bucket"
    assert len(events) == 1 + 1 + 3


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whoever_reads_after_a_step_gets_the_new_values(comparison, stage):
    """With messages that bring nothing before somebody waits for them."""
    plan = fields_of(Plan(sharding=2, sharding_stage=stage))
    run = lambda overlaps: comparison.pools(2).run(  # noqa: E731
        "tests.parallel.readers:read_after_steps", plan=plan, overlaps=overlaps
    )
    overlapped, waited = run(True), run(False)
    assert overlapped == waited
    assert all(len(set(map(str, rank.values()))) == len(rank) for rank in waited), "each step changes them"


@pytest.mark.parametrize("stage", [1, 2])
def test_what_a_step_reads_waits_for_no_new_values(comparison, stage):
    """Else a GPU would have them all before the forward pass begins, and overlap would be a word."""
    plan = fields_of(Plan(sharding=2, sharding_stage=stage))
    target = "tests.parallel.readers:under_way_between_steps"
    for updated, read in comparison.pools(2).run(target, plan=plan):
        assert min(updated) > 0 and read == updated
