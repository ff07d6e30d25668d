"""Normalization over the last dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import _C_ops, nn
from paddle.autograd import PyLayer

from ppfleetx.distributed.device import plugin_operator
from ppfleetx.nn.cpu_ops import ops
from ppfleetx.nn.fused_ops import NO_FUSED_OPS, FusedOps
from ppfleetx.nn.layers import trains_on_cpu


class _Norm(nn.Layer):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter([size], default_initializer=nn.initializer.Constant(1.0))

    def gain(self) -> paddle.Tensor:
        """Return the factor by which the normalized input is multiplied, ``[size]``."""
        return self.weight


class LayerNorm(_Norm):
    """Layer normalization (Ba et al., 2016) with gain and bias of shape ``[size]``."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__(size, epsilon)
        self.bias = self.create_parameter([size], is_bias=True)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        gain = self.gain()
        if trains_on_cpu(x) and x.dtype == paddle.float32 and self.bias is not None:
            return _CpuNorm.apply(x, gain, self.bias, self.epsilon)
        return F.layer_norm(x, gain.shape, gain, self.bias, self.epsilon)


class LayerNormNoBias(LayerNorm):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__(size, epsilon)
        self.bias = None


class LayerNorm1P(LayerNorm):
    """:class:`LayerNorm` with the gain ``1 + weight``, which is computed in float32."""

    def gain(self) -> paddle.Tensor:
        return 1.0 + self.weight.astype("float32")

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.weight.dtype == paddle.float32:
            return super().forward(x)
        x32, bias = x.astype("float32"), self.bias.astype("float32")
        return F.layer_norm(x32, bias.shape, self.gain(), bias, self.epsilon).astype(x.dtype)


class RMSNorm(_Norm):
    """Root-mean-square normalization (Zhang and Sennrich, 2019) in float32, with a gain ``[size]``."""

    fused: FusedOps = NO_FUSED_OPS

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        gain = self.gain()
        if x.dtype == gain.dtype and self.fused.takes("rms_norm", x):
            return fused_rms_norm(x, gain, self.epsilon)
        if trains_on_cpu(x) and x.dtype == paddle.float32:
            return _CpuNorm.apply(x, gain, None, self.epsilon)
        return rms_norm(x, gain, self.epsilon)


class SlicedRMSNorm(RMSNorm):
    """:class:`RMSNorm` over a dimension that is sliced over ranks.

    Args:
        size, total: sizes of this rank's slice and of the whole dimension.
        join: sums a tensor over the ranks, and its gradient in the backward pass.
    """

    def __init__(
        self, size: int, epsilon: float, *, total: int, join: Callable[[paddle.Tensor], paddle.Tensor]
    ) -> None:
        super().__init__(size, epsilon)
        self.total, self.join = total, join

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x32 = x.astype("float32")
        squares = self.join(x32.square().sum(-1, keepdim=True))
        return (x32 * paddle.rsqrt(squares / self.total + self.epsilon)).astype(x.dtype) * self.weight


class PerHeadNorm(nn.Layer):
    """A norm that normalizes each head separately. Each head has its own gain: ``weight [heads * size]``.

    Args:
        norm: norm over one head of ``size`` elements, without ``bias``. Its own gain is fixed to 1.
        width: ``heads * size`` for the heads on this rank.
        zero_centered: whether the gain is ``1 + weight``.
    """

    def __init__(self, norm: nn.Layer, width: int, *, zero_centered: bool) -> None:
        super().__init__()
        self.size, self.added = norm.weight.shape[0], 1.0 if zero_centered else 0.0
        self.weight = self.create_parameter([width], default_initializer=nn.initializer.Constant(1.0))
        del norm.weight
        norm.register_buffer(
            "weight", paddle.full([self.size], 1.0 - self.added, "float32"), persistable=False
        )
        self.norm = norm

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Normalize each head of ``[..., heads * size]``; the gain is applied in float32."""
        heads = x.reshape([*[0] * (x.ndim - 1), -1, self.size]).astype(self.norm.weight.dtype)
        normal = self.norm(heads).flatten(-2).astype("float32")
        return (normal * (self.weight.astype("float32") + self.added)).astype(x.dtype)


class RMSNorm1P(RMSNorm):
    """:class:`RMSNorm` with the gain ``1 + weight`` (Gemma Team, 2024), which is computed in float32."""

    def gain(self) -> paddle.Tensor:
        return 1.0 + self.weight.astype("float32")

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.weight.dtype == paddle.float32:
            return super().forward(x)
        return rms_norm(x.astype("float32"), self.gain(), self.epsilon).astype(x.dtype)


def rms_norm(x: paddle.Tensor, weight: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    """Return ``x / sqrt(mean(x²) + epsilon) * weight`` with plain operators. Paddle's own kernel exists only
    on GPUs."""
    x32 = x.astype("float32")
    inverse = paddle.rsqrt(x32.square().mean(-1, keepdim=True) + epsilon)
    return (x32 * inverse).astype(x.dtype) * weight


def fused_rms_norm(x: paddle.Tensor, weight: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    """Return ``x / sqrt(mean(x²) + epsilon) * weight``, computed by one fused kernel. ``x`` and ``weight``
    have the same dtype. A 16-bit result is rounded only once, after the multiplication by ``weight``."""
    of_plugin = plugin_operator("rms_norm_npu")
    if of_plugin is not None:  # its gradient of the gain is float32, which cast's backward pass converts
        return of_plugin(x, paddle.cast(weight, weight.dtype), epsilon)[0]
    return _C_ops.rms_norm(x, weight, weight.shape, epsilon)[0]


class _CpuNorm(PyLayer):
    """Autograd function of LayerNorm and RMSNorm with a backward pass that is faster on a CPU."""

    @staticmethod
    def forward(
        ctx: Any, x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None, epsilon: float
    ) -> paddle.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.centered, ctx.epsilon = bias is not None, epsilon
        inputs = (x, weight) if bias is None else (x, weight, bias)
        ctx.wanted = [not tensor.stop_gradient for tensor in inputs]
        if bias is not None:
            return F.layer_norm(x, weight.shape, weight, bias, epsilon)
        return rms_norm(x, weight, epsilon)

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        # With x̂ the normalized input, r the inverse deviation, g the gain and dy the upstream gradient:
        # dx = r (dy g - [mean(dy g)] - x̂ mean(dy g x̂)), dg = Σ dy x̂, db = Σ dy. Only LayerNorm has the term
        # in brackets. Sums are computed as matrix-vector products, which halves the time.
        x, weight = ctx.saved_tensor()
        if ops.are_available():
            found = ops.norm_gradients(x, weight, upstream, centered=ctx.centered, epsilon=ctx.epsilon)
            return tuple(g if wanted else None for g, wanted in zip(found, ctx.wanted, strict=False))
        size = weight.shape[0]
        dy = upstream.reshape([-1, size])
        average = paddle.full([size, 1], 1.0 / size)
        rows = x.reshape([-1, size])
        normal = rows - paddle.matmul(rows, average) if ctx.centered else rows.clone()
        inverse = paddle.rsqrt(paddle.matmul(normal * normal, average) + ctx.epsilon)
        normal.multiply_(inverse)
        dy_normal = dy * normal
        ones = paddle.ones([1, dy.shape[0]])
        gain = (weight / size).unsqueeze(-1)
        dx = dy * weight
        if ctx.centered:
            dx.subtract_(paddle.matmul(dy, gain))
        dx.subtract_(normal.multiply_(paddle.matmul(dy_normal, gain))).multiply_(inverse)
        gradients = [dx.reshape(x.shape), paddle.matmul(ones, dy_normal).reshape([-1])]
        if ctx.centered:
            gradients.append(paddle.matmul(ones, dy).reshape([-1]))
        # Paddle requires None for inputs without a gradient (frozen parameters).
        return tuple(g if wanted else None for g, wanted in zip(gradients, ctx.wanted, strict=True))
