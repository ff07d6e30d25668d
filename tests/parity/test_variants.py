"""Options of the model change its losses, and adapters nothing but themselves; plans: ``test_plans.py``."""

import numpy as np
import pytest

from tests.parity.test_plans import LORA, SMALL, WINDOW, YARN, recompute

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
