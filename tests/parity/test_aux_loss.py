"""Losses that are born inside the model: `examples/penalized_gpt.py`, the same under every plan."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.helpers.ranks import Pools, RanksFailedError, fields_of
from tests.parity.comparison import TOLERANCE, Comparison, micro_batch_size_of
from tests.parity.training import build, global_batch, take_step

SMALL = {"Model.num_layers": 4}
RECOMPUTE = {"Model.use_recompute": True, "Model.recompute_granularity": "full"}
CASES: list[tuple[Plan, dict[str, Any]]] = [
    (Plan(), RECOMPUTE),
    (Plan(), {"Model.loss_chunks": 3}),
    (Plan(dp=2), {}),
    (Plan(sharding=2, sharding_stage=3), RECOMPUTE),
    (Plan(mp=2), {}),
    (Plan(mp=2, sequence_parallel=True), RECOMPUTE),
    (Plan(sep=2), RECOMPUTE),
    (Plan(pp=2), RECOMPUTE),
    (Plan(pp=2, virtual_pp_degree=2), RECOMPUTE),
    (Plan(pp=2, pp_schedule="zb_h1"), {}),
    (Plan(pp=2), {"Distributed.overlap_p2p_comm": True}),
    (Plan(mp=2, sep=2, sequence_parallel=True), {}),
]


def train(
    plan: dict[str, Any], world_size: int, micro_batch_size: int, extra: dict[str, Any], by: str = "block"
) -> list[list[float]]:
    """[loss, gradient norm, ...] of three steps and [loss, count, ...] of an evaluation, with the mean and
    the count of each metric; runs in each rank.

    Args:
        by: ``block``: the example; ``task``: the same loss, added up by the task (one card only); ``three``:
            losses of each divisor; ``experts``: the example of experts.
    """
    import paddle

    import examples.penalized_gpt
    from tests.helpers.low_precision import emulated

    values = {**SMALL, "Model.name": "PenalizedGPT", **extra}
    low = emulated() if extra.get("Engine.mix_precision.enable") else contextlib.nullcontext()
    with paddle.utils.unique_name.guard(), low:
        if by == "task":
            values |= {"Model.name": "ListedGPT", "Model.module": "AddedLoss"}
            _register_reference()
        if by == "experts":
            import examples.two_experts  # noqa: F401 registers the architecture

            values["Model.name"] = "TwoExperts"
        if by == "three":
            values["Model.name"] = "ThreeLosses"
            _register_three()
        cfg, ctx, runner = build(plan, world_size, "gpt", "sgd", micro_batch_size, values)
        steps = [take_step(runner, step, cfg, ctx) for step in range(3)]
        found = runner.eval_step(evaluated(ctx.data_rank, ctx.data_size))
    losses = [[one.loss, one.grad_norm] for one in steps] + [[found.loss, found.count]]
    metrics = [[n for m in one.metrics.values() for n in (m.mean, m.count)] for one in (*steps, found)]
    return [[*loss, *own] for loss, own in zip(losses, metrics, strict=True)]


def evaluated(data_rank: int, data_size: int) -> list[dict[str, Any]]:
    """12 rows, on one data rank in three micro batches: schedules with virtual stages fill them up."""
    rows = np.split(np.split(np.arange(12), data_size)[data_rank], 3 if data_size == 1 else 2)
    return [{name: array[part] for name, array in global_batch(3).items()} for part in rows]


def _register_reference() -> None:
    """The example's loss without its means: blocks leave their values in a list, and the task adds them."""
    from ppfleetx.config.registries import ARCHITECTURES, MODULES
    from ppfleetx.core.module.gpt import GPTModule
    from ppfleetx.models.gpt.layers import Block
    from ppfleetx.models.gpt.stages import gpt_stages

    sizes: list[Any] = []

    class Listed(Block):
        def transform(self, hidden: Any, *arguments: Any) -> Any:
            hidden = super().transform(hidden, *arguments)
            sizes.append(hidden.square().mean(-1))
            return hidden

    class AddedLoss(GPTModule):
        def loss(self, outputs: Any, batch: Any, factory: Any) -> Any:
            found, mask = super().loss(outputs, batch, factory), batch["loss_mask"].transpose([1, 0])
            penalty = sum((size * mask).sum() for size in sizes)
            sizes.clear()
            return replace(found, loss=found.loss + 0.01 * penalty)

    ARCHITECTURES.register("ListedGPT", lambda cfg, factory: gpt_stages(cfg, factory, block=Listed))
    MODULES.register("AddedLoss", AddedLoss)


def _register_three() -> None:
    import paddle.nn.functional as F

    from ppfleetx.config.registries import ARCHITECTURES, ArchitectureTraits
    from ppfleetx.models.gpt.layers import Block
    from ppfleetx.models.gpt.stages import gpt_stages
    from ppfleetx.nn.aux_loss import AuxLoss, with_aux_loss
    from ppfleetx.nn.init import Normal
    from ppfleetx.nn.layer_spec import LinearSpec

    class Three(Block):
        def __init__(self, factory: Any, spec: Any, **arguments: Any) -> None:
            super().__init__(factory, spec, **arguments)
            self.factory = factory
            size = spec.hidden_size
            self.router = factory.linear(
                LinearSpec(size, 2, "whole", False, Normal(0.2), input_is_sequence_parallel=True)
            )

        def mlp_branch(self, hidden: Any) -> Any:
            """How much of it is taken is up to a router, whose logits are kept small."""
            logits = self.router(hidden)
            branch = super().mlp_branch(hidden) * F.softmax(logits)[..., :1]
            return with_aux_loss(branch, AuxLoss("router", logits.logsumexp(-1).square(), 1e-1))

        def transform(self, hidden: Any, *arguments: Any) -> Any:
            hidden = super().transform(hidden, *arguments)
            rows = hidden.astype("float32").square().mean(-1).sum(0)  # of the positions here
            whole = self.factory.sum_over_positions(rows).sqrt()
            hidden = with_aux_loss(hidden, AuxLoss("sum", rows, 1e-3, "sequences"))
            hidden = with_aux_loss(hidden, AuxLoss("root", whole, 1e-2, "sequences", ("mp", "sep")))
            return with_aux_loss(hidden, AuxLoss("step", rows.sum(), 1e-4, "step"))

    if "ThreeLosses" not in ARCHITECTURES.names():
        traits = ArchitectureTraits(metrics=("sum", "root", "step", "router"))
        ARCHITECTURES.register("ThreeLosses", functools.partial(gpt_stages, block=Three), traits=traits)


def run(pools: Pools, plan: Plan, extra: dict[str, Any], **more: Any) -> list[list[list[float]]]:
    return pools.run(
        plan,
        "tests.parity.test_aux_loss:train",
        micro_batch_size=micro_batch_size_of(plan),
        extra=extra,
        **more,
    )


OneCard = Callable[..., list[list[float]]]


@pytest.fixture(scope="module")
def one_card(comparison: Comparison) -> OneCard:
    """``one_card(by)``: what one process finds."""
    return functools.cache(lambda by="block": run(comparison.pools, Plan(), {}, by=by)[0])


def test_the_gradient_is_that_of_a_loss_that_the_task_adds_up(
    comparison: Comparison, one_card: OneCard
) -> None:
    found, added = one_card(), one_card("task")
    plain, _ = comparison.reference("gpt", "sgd", 8, steps=3, extra=SMALL)
    for (loss, norm, size, _), (whole, norm_of_whole, *_) in zip(found[:3], added[:3], strict=True):
        assert norm == pytest.approx(norm_of_whole, rel=1e-5)
        # The logged loss is the tokens' alone; four layers, and the metric is their mean.
        assert loss + 0.01 * 4 * size == pytest.approx(whole, rel=1e-6)
    assert abs(found[0][1] / plain["grad_norm"][0] - 1) > 1e-3, "the penalty has a gradient"


# The example; each divisor: sums over positions, a root of sums over sequences, values that only add up, a
# router with a weight of its own; and `examples/two_experts.py`, whose balance is that of whole sequences.
BY = [
    *(("block", *case) for case in CASES[2:6]),
    *(("three", *CASES[i]) for i in (0, 2)),
    ("experts", Plan(dp=2, mp=2), {}),
    ("experts", Plan(mp=2, sep=2, sequence_parallel=True), RECOMPUTE),
    *(("block", *case) for case in (*CASES[:2], *CASES[6:])),
    *(("three", *CASES[i]) for i in (4, 5, 6, 8, 11)),
]


@pytest.mark.slow_after(8)
@pytest.mark.parametrize(("by", "plan", "extra"), BY, ids=str)
def test_plans_find_the_same(
    comparison: Comparison, one_card: OneCard, by: str, plan: Plan, extra: dict[str, Any]
) -> None:
    ranks, expected = run(comparison.pools, plan, extra, by=by), one_card(by)
    assert all(rank == ranks[0] for rank in ranks)
    for found, one in zip(ranks[0], expected, strict=True):
        assert found == pytest.approx(one, rel=TOLERANCE)
    assert by != "experts" or all(1.0 < balance < 2.0 for _, _, balance, *_ in expected)


@pytest.mark.parametrize("plan", [Plan(), Plan(pp=2)], ids=str)
def test_loss_scaling(comparison: Comparison, one_card: OneCard, plan: Plan) -> None:
    """The scale multiplies this gradient too: without it the norm would be that of the tokens' loss."""
    mixed = {"enable": True, "dtype": "float16", "level": "O2", "scale_loss": 1024.0}
    extra = {f"Engine.mix_precision.{key}": value for key, value in mixed.items()}
    for rank in run(comparison.pools, plan, extra):
        assert rank[0] == pytest.approx(one_card()[0], rel=2e-4)


@pytest.mark.parametrize("declared", [["other"], []])
def test_an_undeclared_metric_is_refused_on_every_rank(comparison: Comparison, declared: list[str]) -> None:
    with pytest.raises(RanksFailedError) as told:
        comparison.pools(2).run("tests.parity.test_aux_loss:train_undeclared", declared=declared)
    for rank in range(2):
        assert f"rank {rank}: ConfigError: Model.module" in str(told.value)
    assert "not declared: trunk_size" in str(told.value)


def train_undeclared(declared: list[str]) -> None:
    """Only the second of two pipeline ranks attaches a loss, and its name is not one that is declared."""
    from examples.penalized_gpt import PenalizedBlock
    from ppfleetx.config.registries import ARCHITECTURES, ArchitectureTraits
    from ppfleetx.models.gpt.stages import gpt_stages

    def stages(cfg: Any, factory: Any) -> list[Any]:
        return [*gpt_stages(cfg, factory)[:-3], *gpt_stages(cfg, factory, block=PenalizedBlock)[-3:]]

    name = "".join(["Undeclared", *declared])
    ARCHITECTURES.register(name, stages, traits=ArchitectureTraits(metrics=tuple(declared)))
    train(fields_of(Plan(pp=2)), 2, 4, {"Model.name": name})
