"""Logits of Hugging Face's GPT-NeoX straight from its tensors, in NumPy. See ``reference``.

Legend: b batch, s sequence, h hidden, n heads, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ppfleetx.config.errors import CheckpointError
from ppfleetx.conversion.reference_parts import (
    ACTIVATIONS,
    Tensors,
    attention,
    layer_norm,
    rotated,
)
from ppfleetx.conversion.reference_rope import llama_frequencies


def neox_logits(
    config: Mapping[str, Any], get: Tensors, tokens: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """Logits [b, s, vocabulary] in float32; see :func:`ppfleetx.conversion.reference.hf_logits`."""
    activation = ACTIVATIONS.get(config.get("hidden_act", "gelu"))
    if activation is None:
        raise CheckpointError("the check of logits does not know this hidden_act")
    epsilon, heads = config.get("layer_norm_eps", 1e-5), config["num_attention_heads"]
    width = config["hidden_size"] // heads
    turned, cos, sin = _angles(config, width, positions)
    attention_bias, is_parallel = config.get("attention_bias"), config.get("use_parallel_residual")

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return layer_norm(x, get(f"gpt_neox.{name}.weight"), get(f"gpt_neox.{name}.bias"), epsilon)

    def linear(x: np.ndarray, name: str, has_bias: bool) -> np.ndarray:
        y = x @ get(f"gpt_neox.{name}.weight").T
        return y + get(f"gpt_neox.{name}.bias") if has_bias else y

    def turn(x: np.ndarray) -> np.ndarray:
        return np.concatenate([rotated(x[..., :turned], cos, sin), x[..., turned:]], axis=-1)

    has_bias = attention_bias is None or attention_bias
    x = get("gpt_neox.embed_in.weight")[tokens]
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}"
        fused = linear(norm(x, f"{layer}.input_layernorm"), f"{layer}.attention.query_key_value", has_bias)
        by_head = fused.reshape(*tokens.shape, heads, 3 * width).transpose(0, 2, 1, 3)
        q, k, v = np.split(by_head, 3, axis=-1)
        context = attention(turn(q), turn(k), v, math.sqrt(width))
        attended = x + linear(context, f"{layer}.attention.dense", has_bias)
        source = x if is_parallel is None or is_parallel else attended
        inner = linear(norm(source, f"{layer}.post_attention_layernorm"), f"{layer}.mlp.dense_h_to_4h", True)
        x = attended + linear(activation(inner), f"{layer}.mlp.dense_4h_to_h", True)
    x = norm(x, "final_layer_norm")
    if config.get("tie_word_embeddings"):
        return x @ get("gpt_neox.embed_in.weight").T
    return x @ get("embed_out.weight" if "embed_out.weight" in get else "lm_head.weight").T


def _angles(
    config: Mapping[str, Any], width: int, positions: np.ndarray
) -> tuple[int, np.ndarray, np.ndarray]:
    """How many features of a head are turned, and cos and sin of their angles [b, 1, s, features / 2]."""
    settings = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    part, base = config.get("rotary_pct"), config.get("rotary_emb_base")
    settings.setdefault("partial_rotary_factor", 0.25 if part is None else part)
    settings.setdefault("rope_theta", 10000.0 if base is None else base)
    turned = int(width * settings["partial_rotary_factor"])
    frequencies, magnitude = llama_frequencies({**config, "rope_scaling": settings}, turned)
    angles = positions[:, None, :, None] * frequencies
    return (
        turned,
        (magnitude * np.cos(angles)).astype(np.float32),
        (magnitude * np.sin(angles)).astype(np.float32),
    )
