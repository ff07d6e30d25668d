"""Logits of Hugging Face's GPT-2 and Llama straight from their tensors, in NumPy.

Written from the published definitions and independent of our layers and of our name maps, so that a
converted model can be checked against its source without another framework. One layer is held at a time.

Legend: b batch, s sequence, h hidden, n heads, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy import LazyTensor, cast

Get = Callable[[str], np.ndarray]


def hf_logits(config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], tokens: np.ndarray) -> np.ndarray:
    """Logits [b, s, vocabulary] in float32 of the model described by a ``config.json``.

    Args:
        config: its contents, of a kind that ``models.gpt.hf.model_keys`` accepts.
        tensors: by Hugging Face's names.
        tokens: [b, s] integers.
    """

    def get(name: str) -> np.ndarray:
        tensor = tensors[name]
        return cast(tensor.read(), tensor.dtype, "F32")

    if config["model_type"] == "gpt2":
        prefix = "transformer." if "transformer.wte.weight" in tensors else ""
        return _gpt2(config, lambda name: get(name if name == "lm_head.weight" else prefix + name), tokens)
    return _llama(config, get, tokens)


def _gpt2(config: Mapping[str, Any], get: Get, tokens: np.ndarray) -> np.ndarray:
    epsilon = config.get("layer_norm_epsilon", 1e-5)
    heads = config["n_head"]
    activation = {"relu": lambda x: np.maximum(x, 0), "gelu": _gelu}.get(
        config.get("activation_function", "gelu_new"), _gelu_tanh
    )

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
        return scaled * get(f"{name}.weight") + get(f"{name}.bias")

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ get(f"{name}.weight") + get(f"{name}.bias")

    x = get("wte.weight")[tokens] + get("wpe.weight")[: tokens.shape[1]]
    for index in range(config["n_layer"]):
        layer = f"h.{index}"
        qkv = np.split(linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn"), 3, axis=-1)
        x = x + linear(_attention(*(_heads(part, heads) for part in qkv)), f"{layer}.attn.c_proj")
        inner = activation(linear(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc"))
        x = x + linear(inner, f"{layer}.mlp.c_proj")
    x = norm(x, "ln_f")
    tied = config.get("tie_word_embeddings")
    return x @ get("wte.weight" if tied is None or tied else "lm_head.weight").T


def _llama(config: Mapping[str, Any], get: Get, tokens: np.ndarray) -> np.ndarray:
    epsilon = config.get("rms_norm_eps", 1e-6)
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    base = rope.get("rope_theta") or config.get("rope_theta", 10000.0)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * get(f"{name}.weight")

    def linear(x: np.ndarray, name: str, has_bias: Any) -> np.ndarray:
        y = x @ get(f"{name}.weight").T
        return y + get(f"{name}.bias") if has_bias else y

    x = get("model.embed_tokens.weight")[tokens]
    attention_bias, mlp_bias = config.get("attention_bias"), config.get("mlp_bias")
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        normed = norm(x, f"{layer}.input_layernorm")
        q, k, v = (linear(normed, f"{layer}.self_attn.{part}_proj", attention_bias) for part in "qkv")
        q, k, v = _heads(q, heads), _heads(k, groups), _heads(v, groups)
        q, k = _rotated(q, base, head_dim), _rotated(k, base, head_dim)
        k, v = (np.repeat(part, heads // groups, axis=1) for part in (k, v))
        x = x + linear(_attention(q, k, v), f"{layer}.self_attn.o_proj", attention_bias)
        normed = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(normed, f"{layer}.mlp.gate_proj", mlp_bias)
        gated = gate / (1 + np.exp(-gate)) * linear(normed, f"{layer}.mlp.up_proj", mlp_bias)
        x = x + linear(gated, f"{layer}.mlp.down_proj", mlp_bias)
    tied = config.get("tie_word_embeddings", False)
    return norm(x, "model.norm") @ get("model.embed_tokens.weight" if tied else "lm_head.weight").T


def _heads(x_bsh: np.ndarray, count: int) -> np.ndarray:
    """[b, s, n * d] to [b, n, s, d]."""
    batch, length, _ = x_bsh.shape
    return x_bsh.reshape(batch, length, count, -1).transpose(0, 2, 1, 3)


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention of [b, n, s, d]; returns [b, s, n * d]."""
    scores = q @ k.swapaxes(-1, -2) / np.float32(math.sqrt(q.shape[-1]))
    length = scores.shape[-1]
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    context = weights / weights.sum(-1, keepdims=True) @ v
    return context.transpose(0, 2, 1, 3).reshape(q.shape[0], length, -1)


def _rotated(x_bnsd: np.ndarray, base: float, width: int) -> np.ndarray:
    """Rotary positions; element i turns with element i + d/2."""
    frequencies = base ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    angles = np.arange(x_bnsd.shape[2])[:, None] * frequencies
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    one, two = np.split(x_bnsd, 2, axis=-1)
    return np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def _gelu(x: np.ndarray) -> np.ndarray:
    return (
        np.float32(0.5) * x * (1 + np.vectorize(math.erf, otypes=[np.float32])(x / np.float32(math.sqrt(2))))
    )
