"""A mixture whose tokens all choose one expert, and expert parallelism on several nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.helpers.ranks import Pools
from tests.parity.comparison import Comparison


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("plan", [Plan(), Plan(dp=2, ep=2)], ids=str)
def test_a_run_whose_tokens_all_go_to_one_expert_goes_on_and_says_so(comparison, plan):
    call = "tests.parallel.test_experts:all_to_one_expert"
    (one,) = comparison.pools.run(Plan(), call)
    found = comparison.pools.run(plan, call)
    for rank in found:
        np.testing.assert_allclose(rank["losses"], one["losses"], rtol=1e-6)
        assert rank["loads"] == [4.0] * 22
    said, *others = [[text for text in rank["said"] if "no positions in the last" in text] for rank in found]
    assert [text.partition(":")[0] for text in said] == ["layer 0", "layer 1"]  # once each, on the first rank
    assert "3 of 4 are idle" in said[0] and not any(others)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    """A function ``two_nodes(size)`` whose ranks believe that half of them run on another machine."""
    pools = {size: Pools(PADDLE_LOCAL_SIZE=str(size // 2)) for size in (4, 8)}
    directory, train = tmp_path_factory.mktemp("nodes"), "tests.parallel.test_experts:train_on_two_levels"
    yield lambda size: Comparison(pools[size], directory, short=True, train=train)
    for each in pools.values():
        each.close()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("plan", "model"),
    [
        (Plan(dp=4, ep=4), "moe"),
        (Plan(sharding=4, sharding_stage=3, ep=4), "moe_bias"),
        (Plan(dp=2, mp=2, ep=4, expert_mp=1, sequence_parallel=True), "moe"),
        (Plan(dp=4, mp=2, ep=4), "moe_bias"),
        (Plan(dp=4, pp=2, ep=4, pp_schedule="zb_h1"), "moe"),
    ],
    ids=str,
)
def test_experts_on_two_nodes_train_as_on_one(comparison, two_nodes, plan, model):
    nodes = two_nodes(plan.world_size)
    nodes.check(plan, model)
    one, two = (each.run_plan(plan, model, "adamw", steps=2) for each in (comparison, nodes))
    for key in ("loss", "grad_norm", "metrics"):
        assert [rank[key] for rank in two] == [rank[key] for rank in one], key


# -- in the ranks


def train_on_two_levels(**arguments: Any) -> dict[str, Any]:
    from ppfleetx.resilience.flight_recorder import RECORD
    from tests.parity import training

    result = training.train(**arguments)
    if arguments["world_size"] > 1:
        assert {"ep between nodes", "ep within nodes"} <= set(RECORD.names.values())
    return result


def all_to_one_expert(plan: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Train 22 steps without learning. All experts have the same score, so the first is always chosen. Return
    the log."""
    import logging

    import paddle

    from ppfleetx.utils.log import get_logger
    from tests.parity import training

    said: list[str] = []

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    moe = "{num_experts: 4, expert_ffn_size: 32, top_k: 1, aux_loss: {kind: none}}"
    extra = {"Model.num_layers": 2, "Model.hidden_dropout_prob": 0.0, "Model.moe": moe}
    cfg, ctx, runner = training.build(plan, world_size, "llama", "sgd", 2, extra)
    for name, parameter in runner.named_parameters():
        if name.endswith("router.weight"):
            parameter.set_value(paddle.zeros_like(parameter))
    batches, handler = training.micro_batches(0, cfg, ctx), Said(logging.WARNING)
    get_logger().addHandler(handler)
    try:
        steps = [runner.train_step(batches, step=n, lr=0.0, weight_decay=0.0) for n in range(1, 23)]
    finally:
        get_logger().removeHandler(handler)
    return {
        "losses": [step.loss for step in steps],
        "loads": [step.metrics["expert_load"].mean for step in steps],
        "said": said,
    }
