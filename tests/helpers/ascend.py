"""Operators with the signatures of those that Ascend's plugin brings along, computed by plain ones.

Written from what the plugin's sources of October 2024 say of arguments, shapes and types, not from our calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer


def write_package(directory: Path) -> None:
    """Make ``paddle_custom_device.npu`` of these operators importable from ``directory``."""
    package = directory / "paddle_custom_device"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "npu.py").write_text(f"from {__name__} import flash_attention_npu, fused_rope, rms_norm_npu\n")


def flash_attention_npu(
    query: paddle.Tensor,
    key: paddle.Tensor,
    value: paddle.Tensor,
    fixed_seed_offset: paddle.Tensor | None,
    attn_mask: paddle.Tensor | None,
    dropout: float,
    causal: bool,
    return_softmax: bool,
    is_test: bool,
    is_triangle_upper_mask: bool,
) -> list[Any]:
    """[batch, positions, heads, size]; the mask hides where it is true, and is not looked at with ``causal``.

    Attention is never dropped in the forward pass, so that a call with dropout is a mistake of the caller.
    """
    batch, length, heads, size = query.shape
    assert key.shape == value.shape == [batch, length, key.shape[2], size] and heads % key.shape[2] == 0
    assert dropout == 0.0 and is_test and fixed_seed_offset is None and not return_softmax
    if causal:
        attn_mask = paddle.triu(paddle.ones([length, length]), 1).astype("bool")
    assert attn_mask.dtype == paddle.bool and attn_mask.shape in (
        [length, length],
        [batch, 1, length, length],
    )
    assert is_triangle_upper_mask and bool(
        attn_mask.astype("int32").triu(1).sum() * 2 >= length * (length - 1)
    )
    q, k, v = (t.astype("float32").transpose([0, 2, 1, 3]) for t in (query, key, value))
    k, v = (t.repeat_interleave(heads // key.shape[2], axis=1) for t in (k, v))
    scores = paddle.matmul(q, k, transpose_y=True) / size**0.5 - attn_mask.astype("float32") * 60000.0
    out = paddle.matmul(F.softmax(scores), v).transpose([0, 2, 1, 3]).astype(query.dtype)
    return [out, *(paddle.zeros([1]) for _ in range(6))]


def fused_rope(query: paddle.Tensor, cos: paddle.Tensor, sin: paddle.Tensor) -> paddle.Tensor:
    """[batch, positions, heads, size] and tables [1, positions, 1, size]; halves are paired."""
    size = query.shape[3]
    assert cos.shape == sin.shape == [1, query.shape[1], 1, size] and size % 64 == 0
    left, right = query.chunk(2, axis=-1)
    return query * cos + paddle.concat([-right, left], axis=-1) * sin


class _RmsNorm(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, gamma: paddle.Tensor, epsilon: float) -> Any:
        wide = x.astype("float32")
        inverse = paddle.rsqrt((wide * wide).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, gamma, inverse)
        return (wide * inverse * gamma.astype("float32")).astype(gamma.dtype), inverse

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor, _: Any) -> Any:
        x, gamma, inverse = ctx.saved_tensor()
        dy, normal = upstream.astype("float32"), x.astype("float32") * inverse
        scaled = dy * gamma.astype("float32")
        dx = inverse * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
        return dx.astype(x.dtype), (dy * normal).reshape([-1, gamma.shape[0]]).sum(0)


def rms_norm_npu(x: paddle.Tensor, gamma: paddle.Tensor, epsilon: float) -> list[paddle.Tensor]:
    """The result has the gain's type, and the gain's gradient is float32 whatever the gain is."""
    assert gamma.shape == [x.shape[-1]]
    return list(_RmsNorm.apply(x, gamma, epsilon))
