"""ZB-H1 gives the gradients of 1F1B to the bit, in the same memory, with shorter waits."""

from __future__ import annotations

import paddle
import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from ppfleetx.config.pipeline_order import Pass, zero_bubble_order
from ppfleetx.nn.matmul import Matmul
from tests.helpers.ranks import Pools
from tests.parallel.test_async_exchanges import HALVES
from tests.parity.training import GLOBAL_BATCH


def compare(pools: Pools, plan: Plan, model: str, **extra: object) -> list[dict]:
    return pools.run(
        plan,
        "tests.parallel.two_schedules:compare",
        timeout=180.0,
        model=model,
        micro_batch_size=max(1, GLOBAL_BATCH // plan.data_size // (2 * plan.pp)),
        extra={"Model.num_layers": plan.pp, **extra},
    )


def test_every_pass_once_in_the_order_of_1f1b_and_in_its_memory() -> None:
    for stages in range(2, 7):
        for micro_batches in range(1, 14):
            for stage in range(stages):
                order = zero_bubble_order(stage, stages, micro_batches)
                for part in "FBW":
                    assert [p.micro for p in order if p.part == part] == list(range(micro_batches))
                ahead = min(stages - 1 - stage, micro_batches)
                steady = [
                    p for i in range(micro_batches - ahead) for p in (Pass("F", ahead + i), Pass("B", i))
                ]
                expected = [Pass("F", i) for i in range(ahead)] + steady
                expected += [Pass("B", i) for i in range(micro_batches - ahead, micro_batches)]
                assert [p for p in order if p.part != "W"] == expected
                flying = waiting = 0
                for part, _ in order:
                    flying += (part == "F") - (part == "B")
                    waiting += (part == "B") - (part == "W")
                    # One more than `stage` for a moment: B has ended, and the W that makes room comes next.
                    assert flying <= stages - stage
                    assert waiting <= stage + 1
                    assert flying + waiting <= stages


def test_products_in_two_parts_give_the_same_bits() -> None:
    """For weights that are parameters, transposed, or computed from a parameter; hooks are called."""
    paddle.seed(3)
    weight, table = paddle.randn([24, 40]), paddle.randn([40, 24])
    micro_batches = [paddle.randn([8, 3, 24]) for _ in range(3)]
    split, found = Matmul(defers=True), {}
    for name, matmul in (("whole", Matmul()), ("split", split)):
        leaves = [tensor.clone().detach() for tensor in (weight, table)]
        for leaf in leaves:
            leaf.stop_gradient = False
        calls: list[str] = []
        leaves[1]._register_backward_hook(lambda *_, calls=calls: calls.append("table"))
        inputs = []
        for given in micro_batches:
            x = given.clone().detach()
            x.stop_gradient = False
            inputs.append(x)
            hidden = matmul.linear(x, leaves[0] * 0.5)
            (matmul.linear(x, leaves[1], is_transposed=True) * hidden).sum().backward()
            if name == "split":
                split.end_backward()
        if name == "split":
            assert len(split._waiting) == 3
            assert leaves[0].grad is None
            assert leaves[1].grad is None
            assert not calls
            while split._waiting:
                split.run_next()
        assert calls == ["table"] * 3
        found[name] = [tensor.grad.numpy() for tensor in (*leaves, *inputs)]
    assert all((a == b).all() for a, b in zip(found["whole"], found["split"], strict=True))


def test_frozen_weights_and_evaluation_leave_nothing_behind() -> None:
    split, weight = Matmul(defers=True), paddle.ones([4, 4])
    x = paddle.ones([2, 4])
    x.stop_gradient = False
    split.linear(x, weight).sum().backward()
    weight.stop_gradient = False
    with paddle.no_grad():
        split.linear(x, weight)
    split.end_backward()
    split.run_next()
    assert weight.grad is None


QAT = {
    "Compress.Quantization.enable": True,
    "Compress.Quantization.weight_quantize_type": "channel_wise_abs_max",
}
CASES = [
    (Plan(pp=4), "gpt", {}),
    (Plan(pp=2), "gpt", {"Model.hidden_dropout_prob": 0.2, "Model.use_recompute": True, **QAT}),
    (Plan(pp=2), "gpt", {"Model.lora.rank": 4}),
    (Plan(pp=2, mp=2, sequence_parallel=True), "llama", {}),
    (Plan(pp=2, sharding=2), "gpt", {}),
    (Plan(pp=2, dp=2), "llama", {"Model.loss_chunks": 3}),
    *((Plan(pp=2), "gpt", half) for half in HALVES),
]


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(("plan", "model", "extra"), CASES, ids=str)
def test_numbers_are_those_of_1f1b_to_the_bit(pools: Pools, plan: Plan, model: str, extra: dict) -> None:
    ranks = compare(pools, plan, model, **extra)
    for rank, found in enumerate(ranks):
        assert found["zb_h1"] == found["1f1b"]
        stage = plan.coordinates(rank)["pp"]
        flying, waiting, both = found["most"]
        assert flying == plan.pp - stage
        assert waiting == stage + 1
        assert both <= plan.pp
