"""Latent attention against transformers (goldens: tests/goldens/make_hf_latent.py), and with a cache."""

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.models.gpt.spec import model_spec
from ppfleetx.models.gpt.stages import kernel_options
from ppfleetx.nn.attention import LatentAttention
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.nn.positions import rope
from tests.generation.hf_weights import random_weight
from tests.helpers.low_precision import emulated
from tests.models.gpt_builders import (
    VARIANTS,
    GrowingCache,
    build,
    logits_in_pieces,
    logits_of,
    random_tokens,
    tiny_config,
)

STORED = np.load(Path(__file__).parents[1] / "goldens/hf_latent.npz")
CASES = json.loads(str(STORED["cases"]))
THEIRS = {
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "out_proj": "o_proj",
}
LATENT = VARIANTS["latent"]
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}


def config_of(case: dict) -> ModelConfig:
    """The ``Model`` section for a config.json of transformers."""
    scaling = dict(case.get("rope_parameters", {}))
    if scaling:
        scaling["type"] = scaling.pop("rope_type")
        del scaling["rope_theta"]
    return tiny_config(
        hidden_size=case["hidden_size"],
        num_attention_heads=case["num_attention_heads"],
        max_position_embeddings=64,
        normalization="RMSNorm",
        position_embedding_type="rope",
        rotary_interleaved=case.get("rope_interleave", True),
        rope_scaling=scaling or None,
        add_bias_linear=case.get("attention_bias", False),
        latent_attention={
            "q_rank": case["q_lora_rank"],
            "kv_rank": case["kv_lora_rank"],
            "rope_head_dim": case["qk_rope_head_dim"],
            "nope_head_dim": case["qk_nope_head_dim"],
            "value_head_dim": case["v_head_dim"],
        },
    )


def weight_of(name: str, case: dict, shape: list[int]) -> np.ndarray:
    layer, kind = name.rsplit(".", 1)
    theirs = "q_proj" if layer == "q_up" and case["q_lora_rank"] is None else THEIRS[layer]
    return random_weight(f"{theirs}.{kind}", shape[::-1]).T


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradient_are_those_of_transformers(name):
    case = CASES[name]
    cfg = config_of(case)
    layer = LatentAttention(
        LocalFactory(),
        model_spec(cfg).blocks[0].attention,
        layer_index=0,
        rotary=rope(cfg).rotary,
        options=kernel_options(cfg),
    )
    for path, parameter in layer.named_parameters():
        parameter.set_value(weight_of(path, case, parameter.shape))
    expected, gradient = STORED[f"{name}/output"], STORED[f"{name}/gradient"]
    hidden = paddle.to_tensor(10 * random_weight("hidden", expected.shape), stop_gradient=False)
    positions = paddle.arange(expected.shape[1]).expand(expected.shape[:2])
    output = layer(hidden.transpose([1, 0, 2]), positions).transpose([1, 0, 2])
    (output * paddle.to_tensor(random_weight("up", expected.shape))).sum().backward()
    for got, wanted in ((output, expected), (hidden.grad, gradient)):
        np.testing.assert_allclose(got.numpy(), wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


OPTIONS = {
    "plain": {},
    "queries from hidden states": {"latent_attention": {**LATENT["latent_attention"], "q_rank": None}},
    "neighbors": {"rotary_interleaved": True},
    "yarn": {"rope_scaling": YARN},
    "window": {"attention_window": 3},
    "LayerNorm and biases": {"normalization": "LayerNorm", "add_bias_linear": True},
}


@pytest.mark.parametrize("keys", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("chunks", [[1] * 12, [5, 1, 6]], ids=str)
def test_a_cache_of_compressed_values_gives_what_a_whole_pass_gives(keys, chunks):
    tokens, model = random_tokens(length=12), build(tiny_config(**{**LATENT, **keys}))
    for parameter in model.parameters():  # wide, so that attention is not uniform
        parameter.set_value(parameter * 10 if parameter.ndim > 1 else parameter)
    cache, whole = GrowingCache(), logits_of(model, tokens)
    pieces = logits_in_pieces(model, tokens, chunks, cache)
    np.testing.assert_allclose(pieces, whole, rtol=0, atol=1e-5 * np.abs(whole).max())
    compressed, turned = cache.pairs[0]
    assert (compressed.shape, turned.shape) == ([2, 1, 12, 9], [2, 1, 12, 4])


def test_16_bits_under_mixed_precision():
    tokens, model, cache = random_tokens(length=12), build(tiny_config(**LATENT)), GrowingCache()
    positions = paddle.arange(12).expand([2, 12])
    with paddle.no_grad():
        expected, found = model(tokens).numpy(), []
        with emulated(), paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
            found.append(model(tokens).astype("float32").numpy())
            parts = [
                model(tokens[:, part], positions[:, part], cache=cache) for part in (slice(7), slice(7, 12))
            ]
            found.append(np.concatenate([part.astype("float32").numpy() for part in parts]))
    assert {tensor.dtype for tensor in cache.pairs[0]} == {paddle.bfloat16}
    for got in found:
        np.testing.assert_allclose(got, expected, rtol=0, atol=0.03 * np.abs(expected).max())


def test_neighbours_are_halves_in_another_order():
    """With rotary features reordered into pairs, the scores are equal."""
    x = paddle.randn([2, 1, 3, 5, 6])
    positions = paddle.arange(5).expand([2, 5])
    order = paddle.to_tensor([0, 2, 4, 1, 3, 5])
    keys = {"position_embedding_type": "rope", "head_dim": 6}
    halves, neighbors = (rope(tiny_config(**keys, rotary_interleaved=flag)).rotary for flag in (False, True))
    expected = halves.rotate(x.index_select(order, -1), positions)
    got = neighbors.rotate(x, positions).index_select(order, -1)
    np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("keys", "blamed"),
    [
        ({"position_embedding_type": "learned_absolute"}, "latent_attention, position_embedding_type"),
        ({"num_query_groups": 2}, "num_query_groups"),
        ({"head_dim": 8}, "head_dim"),
        ({"rotary_percent": 0.5}, "rotary_percent"),
        ({"qk_layernorm": True}, "qk_layernorm"),
        ({"latent_attention": {**LATENT["latent_attention"], "rope_head_dim": 3}}, "rope_head_dim"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_keys_of_other_heads_are_refused(keys, blamed):
    with pytest.raises(ValueError, match=blamed):
        tiny_config(**{**LATENT, **keys})
