"""Logits of Hugging Face's models straight from their tensors, in NumPy: GPT-2, Llama, Mistral, Qwen2, Qwen3.

GPT-NeoX is in ``reference_neox``.

Written from the published definitions and from what transformers makes of a ``config.json``, independent of
our layers, our name maps and our reading of that file, so that a converted model can be checked against its
source without another framework, and without sharing a mistake. One layer is held at a time.

Legend: b batch, s sequence, h hidden, n heads, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy import LazyTensor
from ppfleetx.config.errors import CheckpointError
from ppfleetx.conversion.reference_neox import neox_logits
from ppfleetx.conversion.reference_parts import (
    ACTIVATIONS,
    Tensors,
    attention,
    layer_norm,
    rotated,
    to_heads,
)
from ppfleetx.conversion.reference_rope import llama_frequencies

# What is said of files that Paddle's libraries wrote. They store a linear as [in, out].
_OF_PADDLE = frozenset({"np", "paddle", "pd", "pdparams"})


def hf_logits(
    config: Mapping[str, Any],
    tensors: Mapping[str, LazyTensor],
    tokens: np.ndarray,
    *,
    positions: np.ndarray | None = None,
    rounded_to: str | None = None,
    formats: Collection[str | None] = (),
) -> np.ndarray:
    """Logits [b, s, vocabulary] in float32 of the model described by a ``config.json``.

    Args:
        config: its contents.
        tensors: by the names in its files.
        tokens: [b, s] integers.
        positions: [b, s], rising along s; None: 0, 1, 2, ...
        rounded_to: element type (``float16``, ``bfloat16``) that the weights are rounded to first.
        formats: what the files say of their format; those of Paddle's libraries store linears as [in, out].

    Raises:
        CheckpointError: an option that is not computed here.
    """
    if positions is None:
        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    get = Tensors(tensors, rounded_to, not _OF_PADDLE.isdisjoint(formats))
    if config["model_type"] == "gpt2":
        return _gpt2(config, get, tokens, positions)
    if config["model_type"] == "gpt_neox":
        return neox_logits(config, get, tokens, positions)
    return _llama(config, get, tokens, positions)


def _gpt2(config: Mapping[str, Any], get: Tensors, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    epsilon = config.get("layer_norm_epsilon", 1e-5)
    heads = _size(config, "n_head", "num_attention_heads")
    activation = ACTIVATIONS.get(config.get("activation_function", "gelu_new"))
    if activation is None:
        raise CheckpointError("the check of logits does not know this activation_function")

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        weight, bias = (get(f"transformer.{name}.{kind}") for kind in ("weight", "bias"))
        return layer_norm(x, weight, bias, epsilon)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ get(f"transformer.{name}.weight") + get(f"transformer.{name}.bias")

    word = get("transformer.wte.weight")
    x = word[tokens] + get("transformer.wpe.weight")[positions]
    for index in range(_size(config, "n_layer", "num_hidden_layers")):
        layer = f"h.{index}"
        q, k, v = np.split(linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn"), 3, axis=-1)
        scale = (
            math.sqrt(q.shape[-1] // heads) if config.get("scale_attn_weights", True) is not False else 1.0
        )
        scale *= index + 1 if config.get("scale_attn_by_inverse_layer_idx") else 1
        context = attention(to_heads(q, heads), to_heads(k, heads), to_heads(v, heads), scale)
        x = x + linear(context, f"{layer}.attn.c_proj")
        inner = activation(linear(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc"))
        x = x + linear(inner, f"{layer}.mlp.c_proj")
    x = norm(x, "ln_f")
    tied = config.get("tie_word_embeddings")
    return x @ (word if tied is None or tied else get("lm_head.weight")).T


def _llama(config: Mapping[str, Any], get: Tensors, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    if config.get("hidden_act") not in ("silu", "swish", None):
        raise CheckpointError("the check of logits does not know this hidden_act")
    epsilon = config.get("rms_norm_eps", 1e-6)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    groups, width = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    frequencies, magnitude = llama_frequencies(config, width)
    angles = positions[:, None, :, None] * frequencies
    cos = (magnitude * np.cos(angles)).astype(np.float32)
    sin = (magnitude * np.sin(angles)).astype(np.float32)

    qkv_bias, output_bias, mlp_bias = _llama_biases(config)
    has_head_norms, window = config["model_type"] == "qwen3", _window(config)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * get(f"model.{name}.weight")

    def linear(x: np.ndarray, name: str, size: int, has_bias: Any) -> np.ndarray:
        y = get.linear(x, f"model.{name}", size)
        return y + get(f"model.{name}.bias") if has_bias else y

    x = get("model.embed_tokens.weight")[tokens]
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}"
        normed = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            to_heads(linear(normed, f"{layer}.self_attn.{part}_proj", count * width, qkv_bias), count)
            for part, count in (("q", heads), ("k", groups), ("v", groups))
        )
        if has_head_norms:
            q, k = norm(q, f"{layer}.self_attn.q_norm"), norm(k, f"{layer}.self_attn.k_norm")
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (np.repeat(part, heads // groups, axis=1) for part in (k, v))
        context = attention(q, k, v, math.sqrt(width), window)
        x = x + linear(context, f"{layer}.self_attn.o_proj", hidden, output_bias)
        normed = norm(x, f"{layer}.post_attention_layernorm")
        inner = config["intermediate_size"]
        gate = linear(normed, f"{layer}.mlp.gate_proj", inner, mlp_bias)
        gated = gate / (1 + np.exp(-gate)) * linear(normed, f"{layer}.mlp.up_proj", inner, mlp_bias)
        x = x + linear(gated, f"{layer}.mlp.down_proj", hidden, mlp_bias)
    x, tied = norm(x, "norm"), config.get("tie_word_embeddings")
    if tied or (tied is None and "lm_head.weight" not in get):
        return x @ get("model.embed_tokens.weight").T
    return get.linear(x, "lm_head", config["vocab_size"])


def _llama_biases(config: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Whether queries, keys and values, the projection after attention, and the MLP have biases."""
    kind, attention_bias = config["model_type"], bool(config.get("attention_bias"))
    if kind == "qwen2":
        return True, False, False
    if kind == "mistral":
        return False, False, False
    return attention_bias, attention_bias, kind == "llama" and bool(config.get("mlp_bias"))


def _window(config: Mapping[str, Any]) -> int | None:
    """Tokens that a token sees, itself among them; None: all before it."""
    if config["model_type"] == "mistral":
        return config.get("sliding_window")
    kinds = config.get("layer_types")
    slides = bool(config.get("use_sliding_window")) and (
        "sliding_attention" in kinds if kinds else config.get("max_window_layers", 28) == 0
    )
    return config.get("sliding_window", 4096) if slides else None


def _size(config: Mapping[str, Any], name: str, alias: str) -> int:
    """A size of GPT-2's; transformers lets the other name win."""
    return config[name] if config.get(alias) is None else config[alias]
