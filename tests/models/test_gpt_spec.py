"""Parameter counts and FLOPs against published numbers and hand formulas."""

import math

import pytest

from ppfleetx.config.sections.root import ModelConfig
from ppfleetx.models.gpt.spec import flops_per_step, parameter_count, parameter_shapes


def gpt(
    layers: int, hidden: int, heads: int, vocab: int = 51200, positions: int = 2048, **more
) -> ModelConfig:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocab}
    return ModelConfig(**sizes, max_position_embeddings=positions, **more)


# Layers, hidden, heads, padded vocabulary, positions = sequence, batch, parameters, FLOPs.
MEGATRON = [
    (24, 1024, 16, 50304, 1024, 16, 354_871_296, 3.722448e13),
    (24, 2048, 16, 50432, 1024, 32, 1_313_984_512, 2.676967e14),
    (32, 2560, 32, 50432, 2048, 32, 2_652_001_280, 1.106298e15),
    (32, 3072, 32, 50432, 2048, 16, 3_786_381_312, 7.825259e14),
    (96, 12288, 96, 51200, 2048, 1536, 174_615_846_912, 3.340598e18),
]


@pytest.mark.parametrize(("layers", "hidden", "heads", "vocab", "seq", "batch", "params", "flops"), MEGATRON)
def test_published_sizes(layers, hidden, heads, vocab, seq, batch, params, flops):
    model = gpt(layers, hidden, heads, vocab, seq)
    assert parameter_count(model) == params
    assert flops_per_step(model, batch, seq) == pytest.approx(flops, rel=5e-7)


def test_38b_with_every_other_option():
    """38B of MindFormers: GQA, SwiGLU, RMSNorm, sandwich norms, RoPE, no biases, untied head."""
    model = gpt(
        62,
        6144,
        48,
        165664,
        4096,
        vocab_size_divisible_unit=1,
        num_query_groups=8,
        ffn_hidden_size=27648,
        hidden_act="swiglu",
        position_embedding_type="rope",
        normalization="RMSNorm",
        sandwich_norm=True,
        add_bias_linear=False,
        tie_word_embeddings=False,
    )
    assert parameter_count(model) == 39_093_884_928


@pytest.mark.parametrize(
    ("keys", "added"),
    [
        ({"add_qkv_bias": True}, 2 * 192),
        ({"add_out_proj_bias": True}, 2 * 64),
        ({"add_mlp_bias": True}, 2 * 320),
        ({"tie_word_embeddings": False, "add_head_bias": True}, 128 * 64 + 128),
    ],
)
def test_biases_by_place(keys, added):
    without = {"add_bias_linear": False}
    plain, more = gpt(2, 64, 4, 100, 16, **without), gpt(2, 64, 4, 100, 16, **without, **keys)
    assert parameter_count(more) == parameter_count(plain) + added


def test_shapes_agree_with_count_and_are_named():
    model = gpt(2, 64, 4, 100, 16, num_query_groups=2, head_dim=24, hidden_act="swiglu", sandwich_norm=True)
    shapes = parameter_shapes(model)
    assert sum(math.prod(shape) for shape in shapes.values()) == parameter_count(model)
    assert shapes["embedding.word_embeddings.weight"] == (128, 64)
    assert shapes["decoder.layers.1.attention.qkv.weight"] == (64, 4 * 24 + 2 * 2 * 24)
    assert shapes["decoder.layers.1.attention.out_proj.weight"] == (96, 64)
    assert shapes["decoder.layers.0.mlp.fc1.weight"] == (64, 2 * 128)  # int(256 * 2/3 / 64) * 64 = 128
    assert shapes["decoder.layers.0.mlp.fc2.weight"] == (128, 64)
    assert shapes["decoder.layers.0.mlp_post_norm.bias"] == (64,)
    assert "head.weight" not in shapes
