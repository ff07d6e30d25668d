"""Logits of Hugging Face's GPT-2 and Llama straight from their tensors, in NumPy.

Written from the published definitions and from what transformers makes of a ``config.json``, independent of
our layers, our name maps and our reading of that file, so that a converted model can be checked against its
source without another framework, and without sharing a mistake. One layer is held at a time.

Legend: b batch, s sequence, h hidden, n heads, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppfleetx.checkpoint.foreign.lazy import LazyTensor, cast
from ppfleetx.checkpoint.foreign.reference_rope import llama_frequencies
from ppfleetx.config.errors import CheckpointError

Get = Callable[[str], np.ndarray]

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
    get = _Tensors(tensors, rounded_to, not _OF_PADDLE.isdisjoint(formats))
    if config["model_type"] == "gpt2":
        return _gpt2(config, get, tokens, positions)
    return _llama(config, get, tokens, positions)


@dataclass(frozen=True)
class _Tensors:
    """Tensors in float32, by name with or without the prefix of the model's body."""

    tensors: Mapping[str, LazyTensor]
    rounded_to: str | None
    is_paddle: bool

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __call__(self, name: str) -> np.ndarray:
        other = name.removeprefix("transformer.") if name.startswith("transformer.") else f"llama{name[5:]}"
        tensor = self.tensors[name] if name in self.tensors else self.tensors[other]
        return _rounded(cast(tensor.read(), tensor.dtype, "F32"), self.rounded_to)

    def linear(self, x: np.ndarray, name: str, width: int) -> np.ndarray:
        """``x`` times a matrix that is stored as [width, in], or as [in, width] by Paddle's libraries."""
        matrix = self(f"{name}.weight")
        is_square = matrix.shape[0] == matrix.shape[1]
        if self.is_paddle and (is_square or matrix.shape == (x.shape[-1], width)):
            return x @ matrix
        return x @ matrix.T


def _rounded(values: np.ndarray, kind: str | None) -> np.ndarray:
    """float32 rounded to the nearest number of another type (to even where two are near), as float32."""
    if kind == "float16":
        return values.astype(np.float16).astype(np.float32)
    if kind == "bfloat16":  # eight significant bits
        mantissa, exponent = np.frexp(values)
        return np.ldexp(np.rint(mantissa * 256) / 256, exponent).astype(np.float32)
    return values


def _gpt2(config: Mapping[str, Any], get: _Tensors, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    epsilon = config.get("layer_norm_epsilon", 1e-5)
    heads = _size(config, "n_head", "num_attention_heads")
    activation = _ACTIVATIONS.get(config.get("activation_function", "gelu_new"))
    if activation is None:
        raise CheckpointError("the check of logits does not know this activation_function")

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
        return scaled * get(f"transformer.{name}.weight") + get(f"transformer.{name}.bias")

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
        context = _attention(_heads(q, heads), _heads(k, heads), _heads(v, heads), scale)
        x = x + linear(context, f"{layer}.attn.c_proj")
        inner = activation(linear(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc"))
        x = x + linear(inner, f"{layer}.mlp.c_proj")
    x = norm(x, "ln_f")
    tied = config.get("tie_word_embeddings")
    return x @ (word if tied is None or tied else get("lm_head.weight")).T


def _llama(config: Mapping[str, Any], get: _Tensors, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    if config.get("hidden_act") not in ("silu", "swish", None):
        raise CheckpointError("the check of logits does not know this hidden_act")
    epsilon = config.get("rms_norm_eps", 1e-6)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    groups, width = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    frequencies, magnitude = llama_frequencies(config, width)
    angles = positions[:, None, :, None] * frequencies
    cos = (magnitude * np.cos(angles)).astype(np.float32)
    sin = (magnitude * np.sin(angles)).astype(np.float32)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * get(f"model.{name}.weight")

    def linear(x: np.ndarray, name: str, size: int, has_bias: Any) -> np.ndarray:
        y = get.linear(x, f"model.{name}", size)
        return y + get(f"model.{name}.bias") if has_bias else y

    x = get("model.embed_tokens.weight")[tokens]
    attention_bias, mlp_bias = config.get("attention_bias"), config.get("mlp_bias")
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}"
        normed = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            _heads(linear(normed, f"{layer}.self_attn.{part}_proj", count * width, attention_bias), count)
            for part, count in (("q", heads), ("k", groups), ("v", groups))
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        k, v = (np.repeat(part, heads // groups, axis=1) for part in (k, v))
        context = _attention(q, k, v, math.sqrt(width))
        x = x + linear(context, f"{layer}.self_attn.o_proj", hidden, attention_bias)
        normed = norm(x, f"{layer}.post_attention_layernorm")
        inner = config["intermediate_size"]
        gate = linear(normed, f"{layer}.mlp.gate_proj", inner, mlp_bias)
        gated = gate / (1 + np.exp(-gate)) * linear(normed, f"{layer}.mlp.up_proj", inner, mlp_bias)
        x = x + linear(gated, f"{layer}.mlp.down_proj", hidden, mlp_bias)
    x, tied = norm(x, "norm"), config.get("tie_word_embeddings")
    if tied or (tied is None and "lm_head.weight" not in get):
        return x @ get("model.embed_tokens.weight").T
    return get.linear(x, "lm_head", config["vocab_size"])


def _size(config: Mapping[str, Any], name: str, alias: str) -> int:
    """A size of GPT-2's; transformers lets the other name win."""
    return config[name] if config.get(alias) is None else config[alias]


def _heads(x_bsh: np.ndarray, count: int) -> np.ndarray:
    """[b, s, n * d] to [b, n, s, d]."""
    batch, length, _ = x_bsh.shape
    return x_bsh.reshape(batch, length, count, -1).transpose(0, 2, 1, 3)


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Causal attention of [b, n, s, d]; returns [b, s, n * d]."""
    scores = q @ k.swapaxes(-1, -2) / np.float32(scale)
    length = scores.shape[-1]
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    context = weights / weights.sum(-1, keepdims=True) @ v
    return context.transpose(0, 2, 1, 3).reshape(q.shape[0], length, -1)


def _rotated(x_bnsd: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotary positions; element i turns with element i + d/2."""
    one, two = np.split(x_bnsd, 2, axis=-1)
    return np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def _gelu(x: np.ndarray) -> np.ndarray:
    return (
        np.float32(0.5) * x * (1 + np.vectorize(math.erf, otypes=[np.float32])(x / np.float32(math.sqrt(2))))
    )


_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
}
