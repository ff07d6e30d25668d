"""Loss per source of a blend: the same under every kind of plan, and nothing of the training changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ppfleetx.config.plan import ParallelPlan as Plan
from tests.helpers.ranks import Pools
from tests.parity.comparison import TOLERANCE, Comparison, fields_of, micro_batch_size_of
from tests.parity.training import GLOBAL_BATCH, build, global_batch, micro_batches

PLANS = [
    Plan(dp=2),
    Plan(mp=2, sequence_parallel=True),
    Plan(pp=2),
    Plan(pp=2, virtual_pp_degree=2),
    Plan(sep=2),
    Plan(dp=2, pp=2),
]
NUM_SOURCES = 4  # the last has no sample


def sources_of(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, NUM_SOURCES - 1, GLOBAL_BATCH)


def train(plan: dict[str, Any], world_size: int, micro_batch_size: int, told: bool) -> list[Any]:
    """Loss, and what is told of the sources, of two steps; runs in each rank of a pool."""
    import paddle

    with paddle.utils.unique_name.guard():
        extra, names = {"Model.num_layers": 4}, [str(i) for i in range(NUM_SOURCES if told else 0)]
        cfg, ctx, runner = build(plan, world_size, "gpt", "sgd", micro_batch_size, extra, sources=names)
        found = []
        for step in range(2):
            size = cfg.batch.local_batch_size
            rows = sources_of(step)[ctx.data_rank * size : (ctx.data_rank + 1) * size]
            parts = np.split(rows, cfg.batch.accumulate_steps)
            batches = micro_batches(step, cfg, ctx)
            if told:
                batches = [{**b, "source_ids": part} for b, part in zip(batches, parts, strict=True)]
            output = runner.train_step(batches, step=step + 1, lr=0.1, weight_decay=0.1)
            sources = {int(name.removeprefix("source/")): metric for name, metric in output.metrics.items()}
            found.append([output.loss, output.num_valid_tokens, sources])
    return found


def run(pools: Pools, plan: Plan, *, told: bool = True) -> list[list[Any]]:
    return pools(plan.world_size).run(
        "tests.parity.test_sources:train",
        timeout=120.0,
        plan=fields_of(plan),
        world_size=plan.world_size,
        micro_batch_size=micro_batch_size_of(plan),
        told=told,
    )


@pytest.fixture(scope="module")
def one_card(comparison: Comparison) -> list[Any]:
    return run(comparison.pools, Plan())[0]


def test_parts_add_up_to_the_loss(comparison: Comparison, one_card: list[Any]) -> None:
    for step, (loss, tokens, sources) in enumerate(one_card):
        told = {int(source): values for source, values in sources.items()}
        batch, ids = global_batch(step), sources_of(step)
        valid = {i: batch["loss_mask"][ids == i].sum() for i in range(NUM_SOURCES)}
        assert {i: count for i, (_, count) in told.items()} == {i: n for i, n in valid.items() if n}
        assert sum(part for part, _ in told.values()) / tokens == pytest.approx(loss, rel=1e-6)
        means = [part / count for part, count in told.values()]
        assert max(means) - min(means) > 1e-3, "sources differ"
    silent = run(comparison.pools, Plan(), told=False)[0]
    assert [step[0] for step in silent] == [step[0] for step in one_card], "the same numbers, bit for bit"
    assert all(not sources for _, _, sources in silent)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_plans_tell_the_same(comparison: Comparison, one_card: list[Any], plan: Plan) -> None:
    ranks = run(comparison.pools, plan)
    assert all(rank == ranks[0] for rank in ranks)
    for (_, _, found), (_, _, expected) in zip(ranks[0], one_card, strict=True):
        assert found.keys() == expected.keys()
        for source, (loss, tokens) in found.items():
            assert tokens == expected[source][1]
            assert loss == pytest.approx(expected[source][0], rel=TOLERANCE)
