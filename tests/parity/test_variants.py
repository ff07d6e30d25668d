"""Options of the model change its losses, adapters nothing but themselves, and blocks may differ by index;
plans: ``test_plans.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.parity.comparison import Comparison
from tests.parity.test_plans import DIFFERENT_BLOCKS, LORA, SMALL, WINDOW, YARN, recompute
from tests.parity.variants import WINDOWED

BY_LAYER = {"Model.attention_window_layers": "[0]", "Model.rotary_layers": "[0, 1]"}  # SMALL has two layers


@pytest.mark.slow_after(6)
@pytest.mark.parametrize(
    ("model", "extra", "other"),
    [
        ("llama", YARN, {}),
        ("llama", WINDOW, {**WINDOW, "Model.attention_window": "null"}),
        ("llama", WINDOW, {**WINDOW, "Model.rotary_percent": 1.0}),
        ("mixed", {}, {"Model.parallel_residual": False}),
        ("mixed", {}, {"Model.qk_layernorm": False}),
        *(
            ("gemma", BY_LAYER, {**BY_LAYER, f"Model.{key}": value})
            for key, value in {
                "embedding_multiplier": 1.0,
                "residual_multiplier": 1.0,
                "attention_multiplier": "null",
                "logits_multiplier": 1.0,
                "attn_logit_softcapping": "null",
                "final_logit_softcapping": "null",
                "attention_window_layers": "[1]",
                "local_rotary_base": 50.0,
                "rotary_layers": "[0]",
                "hidden_act": "swiglu",
            }.items()
        ),
        ("alibi", {}, {"Model.position_embedding_type": "none"}),
        ("alibi", {}, {"Model.embedding_norm": False}),
        ("alibi", {}, {"Model.shared_input_norm": False, "Model.parallel_residual": False}),
    ],
)
def test_each_option_changes_the_losses(comparison, model, extra, other):
    losses = [
        comparison.reference(model, "sgd", 8, extra={**keys, **SMALL})[0]["loss"][0]
        for keys in (extra, other)
    ]
    assert losses[0] != pytest.approx(losses[1], rel=1e-5)


def test_only_adapters_change_and_recomputation_reaches_them(comparison):
    result, directory = comparison.reference("gpt", "sgd", 8, extra={**LORA, **SMALL})
    with np.load(f"{directory}/first.npz") as first, np.load(f"{directory}/last.npz") as last:
        changed = {name for name in first.files if (first[name] != last[name]).any()}
        adapters = {name for name in first.files if ".lora." in name}
    assert changed == adapters and len(adapters) == 2 * 4 * 2
    assert result["loss"][-1] < result["loss"][0]
    recomputed, _ = comparison.reference("gpt", "sgd", 8, extra={**LORA, **recompute(), **SMALL})
    assert recomputed["loss"] == pytest.approx(result["loss"], rel=1e-6)


def test_each_block_is_its_own(comparison: Comparison) -> None:
    four = {"Model.num_layers": 4}
    losses = [
        comparison.reference("llama", "sgd", 8, **DIFFERENT_BLOCKS, extra={**four, **keys})[0]["loss"][0]
        for keys in ({"Model.name": WINDOWED}, {}, {"Model.attention_window": 3})
    ]
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
    first, last = ([held_parameters(one, stage).used for one in (plain, wide)] for stage in (0, 1))
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
