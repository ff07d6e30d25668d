"""Variants of the model equal one card under each kind of plan; ``make parity`` runs more plans."""

import numpy as np
import pytest

from ppfleetx.config.plan import ParallelPlan as Plan
from tests.parity.comparison import TOLERANCE

TWO_LAYERS = {"Model.num_layers": 2}
RECOMPUTE = {"Model.use_recompute": True}
YARN = {
    "Model.rope_scaling.type": "yarn",
    "Model.rope_scaling.factor": 4.0,
    "Model.rope_scaling.original_max_position_embeddings": 4,
    "Model.rope_scaling.beta_fast": 2.0,
}
WINDOW = {"Model.attention_window": 5, "Model.rotary_percent": 0.5, "Model.embedding_initializer_range": 0.4}
LORA = {"Model.lora.rank": 4, "Model.lora.alpha": 16.0}
MP, SP, SEP, PP = Plan(mp=2), Plan(mp=2, sequence_parallel=True), Plan(sep=2), Plan(pp=2)
INTERLEAVED, STAGE_3 = Plan(pp=2, virtual_pp_degree=2), Plan(sharding=2, sharding_stage=3)
# Adapters under data parallelism and the other stages of sharding: tests/e2e/test_finetuning.py.
CASES = [
    *((plan, "llama", {**YARN, **RECOMPUTE}) for plan in (SP, SEP, PP)),
    *(
        (plan, "llama", {**WINDOW, **RECOMPUTE, "Model.recompute_granularity": "core_attn"})
        for plan in (SP, SEP, PP)
    ),
    *(
        (plan, "mixed", {**RECOMPUTE, "Model.recompute_granularity": "full_attn"})
        for plan in (MP, SP, SEP, INTERLEAVED, STAGE_3)
    ),
    (MP, "llama", LORA),
    (SEP, "gpt", LORA),
    (PP, "gpt", LORA),
    (STAGE_3, "gpt", {**LORA, **RECOMPUTE}),
    (MP, "latent", {"Model.attention_window": 5}),
    (SP, "latent", {**RECOMPUTE, "Model.recompute_granularity": "core_attn"}),
    (SEP, "latent", {"Model.latent_attention.q_rank": "null"}),
    (PP, "latent", {**RECOMPUTE, "Model.recompute_granularity": "full_attn"}),
    (STAGE_3, "latent", {}),
    (Plan(mp=2, sep=2, sequence_parallel=True), "latent", {"Model.add_bias_linear": True}),
    (Plan(pp=2, mp=2, pp_schedule="zb_h1"), "latent", {}),
]


@pytest.mark.parametrize(("plan", "model", "extra"), CASES, ids=lambda one: str(one)[:40])
def test_a_variant_trains_as_on_one_card(comparison, plan, model, extra):
    layers = {} if plan.virtual_pp_degree > 1 else TWO_LAYERS
    found = comparison.run(plan, model, "sgd", extra={**extra, **layers}, documents=model == "latent")
    assert found.first == 0.0
    assert found.worst <= TOLERANCE, str(found)


@pytest.mark.parametrize(
    ("model", "extra", "other"),
    [
        ("llama", YARN, {}),
        ("llama", WINDOW, {**WINDOW, "Model.attention_window": "null"}),
        ("llama", WINDOW, {**WINDOW, "Model.rotary_percent": 1.0}),
        ("mixed", {}, {"Model.parallel_residual": False}),
        ("mixed", {}, {"Model.qk_layernorm": False}),
    ],
)
def test_each_option_changes_the_losses(comparison, model, extra, other):
    losses = [
        comparison.reference(model, "sgd", 8, extra={**keys, **TWO_LAYERS})[0]["loss"][0]
        for keys in (extra, other)
    ]
    assert losses[0] != pytest.approx(losses[1], rel=1e-5)


def test_only_adapters_change_and_recomputation_reaches_them(comparison):
    result, directory = comparison.reference("gpt", "sgd", 8, extra={**LORA, **TWO_LAYERS})
    with np.load(f"{directory}/first.npz") as first, np.load(f"{directory}/last.npz") as last:
        changed = {name for name in first.files if (first[name] != last[name]).any()}
        adapters = {name for name in first.files if ".lora." in name}
    assert changed == adapters and len(adapters) == 2 * 4 * 2
    assert result["loss"][-1] < result["loss"][0]
    recomputed, _ = comparison.reference("gpt", "sgd", 8, extra={**LORA, **RECOMPUTE, **TWO_LAYERS})
    assert recomputed["loss"] == pytest.approx(result["loss"], rel=1e-6)
