"""If some ranks or micro batches skip a layer, all ranks still send the same messages."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.parity.training import build, take_step

TRAIN = "tests.parallel.test_conditional:train"


RANKS = [Plan(dp=2), *(Plan(sharding=2, sharding_stage=stage) for stage in (1, 2, 3))]


@pytest.fixture(scope="module")
def on_one_card(comparison):
    """Losses and gradient norms of a model, by name."""
    return functools.cache(lambda name: comparison.pools.run(Plan(), TRAIN, micro_batch_size=1, name=name)[0])


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *(("ConditionalGPT", plan) for plan in RANKS),
        ("ConditionalGPT", Plan(pp=2, sharding=2, sharding_stage=3, pp_schedule="zb_h1")),
        ("WideGPT", Plan(sharding=2, sharding_stage=2)),
        ("WideGPT", Plan(pp=2, sharding=2, sharding_stage=2)),
    ],
    ids=str,
)
def test_plans_give_what_one_card_gives(comparison, on_one_card, name, plan):
    """The models have a layer that only some batches use, or a weight whose gradient comes after the
    input's."""
    ranks = comparison.pools.run(plan, TRAIN, micro_batch_size=1, name=name)
    assert all(rank == ranks[0] for rank in ranks)
    for found, expected in zip(ranks[0], on_one_card(name), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


# -- in the ranks


def train(
    plan: dict[str, Any], world_size: int, micro_batch_size: int, name: str = "ConditionalGPT"
) -> list[list[float]]:
    """Loss and gradient norm of four steps."""
    import paddle

    from ppfleetx.config.registries import ARCHITECTURES
    from ppfleetx.models.gpt.layers import Block
    from ppfleetx.models.gpt.stages import gpt_stages
    from ppfleetx.nn.init import Normal
    from ppfleetx.nn.layer_spec import LinearSpec

    class Wide(Block):
        """The weight of its first product passes through float64, so the block's input gets its gradient
        before the weight does."""

        def __init__(self, factory: Any, spec: Any, **arguments: Any) -> None:
            super().__init__(factory, spec, **arguments)
            size = spec.hidden_size
            self.extra = factory.linear(
                LinearSpec(size, size, "whole", False, Normal(0.1), input_is_sequence_parallel=True)
            )

        def transform(self, hidden: Any, *arguments: Any) -> Any:
            weight = (self.extra.weight.astype("float64") * 1.0).astype(hidden.dtype)
            return super().transform(hidden + hidden @ weight, *arguments)

    class Conditional(Block):
        def __init__(self, factory: Any, spec: Any, **arguments: Any) -> None:
            super().__init__(factory, spec, **arguments)
            size = spec.hidden_size
            self.extra = factory.linear(
                LinearSpec(size, size, "whole", True, Normal(0.1), input_is_sequence_parallel=True)
            )

        def transform(self, hidden: Any, *arguments: Any) -> Any:
            hidden = super().transform(hidden, *arguments)
            used = (hidden[:, :, :1].sum(0, keepdim=True) > 0).astype(hidden.dtype)
            return hidden + self.extra(hidden) * used if used.any() else hidden

    for known, block in (("ConditionalGPT", Conditional), ("WideGPT", Wide)):
        if known not in ARCHITECTURES.names():
            ARCHITECTURES.register(known, partial(gpt_stages, block=block))
    with paddle.utils.unique_name.guard():
        extra = {"Model.name": name, "Model.num_layers": 4}
        cfg, ctx, runner = build(plan, world_size, "gpt", "sgd", micro_batch_size, extra)
        steps = [take_step(runner, step, cfg, ctx) for step in range(4)]
    return [[one.loss, one.grad_norm] for one in steps]
