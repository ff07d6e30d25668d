"""Blocks that differ by index: a window in every second one trains the same under every plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.parity import training
from tests.parity.comparison import Comparison

WINDOWED = {"Model.name": "WindowInEverySecondBlock", "Model.num_layers": 4}


def train(*arguments: Any, **options: Any) -> dict[str, Any]:
    from ppfleetx.config.registries import ARCHITECTURES, ArchitectureTraits

    traits = ArchitectureTraits(spec=windowed_spec)
    ARCHITECTURES.register(WINDOWED["Model.name"], "ppfleetx.models.gpt.stages:gpt_stages", traits=traits)
    return training.train(*arguments, **options)


def windowed_spec(cfg: Any) -> Any:
    from ppfleetx.models.gpt.spec import gpt_spec

    spec = gpt_spec(cfg)
    block = spec.blocks[0]
    other = replace(block, attention=replace(block.attention, window=3))
    return replace(spec, blocks=(block, other) * (cfg.num_layers // 2))


@pytest.fixture(scope="module")
def windowed(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comparison]:
    name = "tests.parity.test_different_blocks:train"
    yield Comparison(comparison.pools, tmp_path_factory.mktemp("blocks"), short=True, train=name)


@pytest.mark.parametrize("plan", [Plan(mp=2), Plan(pp=2), Plan(sep=2)], ids=str)
def test_they_train_as_on_one_card(windowed: Comparison, plan: Plan) -> None:
    windowed.check(plan, "llama", extra=WINDOWED)


def test_each_block_is_its_own(windowed: Comparison) -> None:
    losses = []
    for model in (WINDOWED, {"Model.num_layers": 4}, {"Model.num_layers": 4, "Model.attention_window": 3}):
        losses.append(windowed.reference("llama", "sgd", 8, extra=model)[0]["loss"][0])
    assert len({round(loss, 4) for loss in losses}) == 3, losses


def test_the_planner_sees_which_blocks_a_stage_has() -> None:
    """Of four blocks the second has a wider feed-forward part."""
    from ppfleetx.config.registries import ARCHITECTURES, ArchitectureTraits
    from ppfleetx.models.gpt.spec import gpt_spec, parameter_count
    from ppfleetx.planner.cards import load_card
    from ppfleetx.planner.communication import Cluster
    from ppfleetx.planner.parameters import held_parameters
    from ppfleetx.planner.prediction import Prediction
    from tests.planner.test_parts import small_job

    def wide_spec(cfg: Any) -> Any:
        spec = gpt_spec(cfg)
        block = spec.blocks[0]
        wide = replace(block, mlp=replace(block.mlp, ffn_hidden_size=4 * block.mlp.ffn_hidden_size))
        return replace(spec, blocks=(block, wide, block, block))

    traits = ArchitectureTraits(spec=wide_spec)
    ARCHITECTURES.register("OneWideBlock", "ppfleetx.models.gpt.stages:gpt_stages", traits=traits)
    plain, wide = (small_job(Plan(pp=2), name=name) for name in ("GPT", "OneWideBlock"))
    first, last = ([held_parameters(one, stage).values for one in (plain, wide)] for stage in (0, 1))
    assert first[1] - first[0] == parameter_count(wide.model) - parameter_count(plain.model) > 0
    assert last[1] == last[0]
    memory, other = (Prediction(one, Cluster(load_card("A100-80GB"))).memory for one in (plain, wide))
    assert other[0].activations > memory[0].activations and other[1] == memory[1]


def test_the_old_form_still_declares_a_layer(caplog: pytest.LogCaptureFixture) -> None:
    """``layer_shapes`` works for one more version, and says so."""
    from ppfleetx.config.registries import ARCHITECTURES, ArchitectureTraits
    from ppfleetx.models.gpt.spec import gpt_spec, parameter_specs
    from ppfleetx.nn.param_spec import Shard
    from tests.models.gpt_builders import tiny_config

    def shapes(cfg: Any) -> dict[str, tuple[int, ...]]:
        known = gpt_spec(cfg).blocks[0].parameters()
        return {**{name: spec.shape for name, spec in known.items()}, "gate": (4, 8), "scale": (32,)}

    traits = ArchitectureTraits(layer_shapes=shapes)
    ARCHITECTURES.register("Listed", "ppfleetx.models.gpt.stages:gpt_stages", traits=traits)
    specs = parameter_specs(tiny_config(name="Listed"))
    assert [record.message for record in caplog.records if "layer_shapes" in record.message]
    assert specs["decoder.layers.1.gate"].placement("mp") == Shard(1)
    assert specs["decoder.layers.1.scale"].sums("mp")
    assert specs["decoder.layers.0.mlp.fc2.weight"].placement("mp") == Shard(0)
