"""What the NumPy networks of ``reference`` and ``reference_neox`` are made of.

Legend: b batch, s sequence, n heads, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ppfleetx.checkpoint.lazy import LazyTensor, cast


@dataclass(frozen=True)
class Tensors:
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


def to_heads(x_bsh: np.ndarray, count: int) -> np.ndarray:
    """[b, s, n * d] to [b, n, s, d]."""
    batch, length, _ = x_bsh.shape
    return x_bsh.reshape(batch, length, count, -1).transpose(0, 2, 1, 3)


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, window: int | None = None
) -> np.ndarray:
    """Causal attention of [b, n, s, d] to the last ``window`` tokens, its own among them; [b, s, n * d]."""
    scores = q @ k.swapaxes(-1, -2) / np.float32(scale)
    length = scores.shape[-1]
    back = np.arange(length)[:, None] - np.arange(length)
    seen = (back >= 0) & (back < (length if window is None else window))
    scores = np.where(seen, scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    context = weights / weights.sum(-1, keepdims=True) @ v
    return context.transpose(0, 2, 1, 3).reshape(q.shape[0], length, -1)


def rotated(x_bnsd: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
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


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, epsilon: float) -> np.ndarray:
    """Normalise the last dimension by mean and variance."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * weight + bias


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
}
