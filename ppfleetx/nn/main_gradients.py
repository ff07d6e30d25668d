"""Products whose weights' gradients are added to float32 sums by the matrix product itself.

At O2 a backward pass gives a 16-bit gradient, which is converted to float32 and added to the parameter's
``main_grad``. Paddle's ``fused_linear_param_grad_add`` does the three in one kernel, and rounds nothing to 16
bits on the way.
"""

from __future__ import annotations

from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import _C_ops
from paddle.autograd import PyLayer

from ppfleetx.nn.fused import FusedOps
from ppfleetx.nn.products import Products


class AddingProducts(Products):
    """Products that add to ``main_grad``, where whoever reads gradients looks first.

    Hooks on a weight are called as if its gradient came the usual way. A weight that is computed from a
    parameter (rounded, cast) gets its gradient the usual way.

    Args:
        fused: fused operators to take.
    """

    def __init__(self, fused: FusedOps) -> None:
        self._fused = fused

    def linear(
        self, x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None, name: Any = None
    ) -> paddle.Tensor:
        trains = paddle.is_grad_enabled() and weight.is_leaf and not weight.stop_gradient
        if not trains or not self._fused.takes("linear_grad_add", weight):
            return super().linear(x, weight, bias)
        return _Adding.apply(x, weight, bias)


class _Adding(PyLayer):
    """``x @ weight + bias``; its backward pass adds to ``weight.main_grad``."""

    @staticmethod
    def forward(
        ctx: Any, x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None
    ) -> paddle.Tensor:
        product = F.linear(x, weight, bias)
        # The weight itself, not what it holds now: sharding stage 3 brings its values back for this pass.
        ctx.weight, ctx.x, ctx.x_dtype = weight, x.detach().astype(product.dtype), x.dtype
        ctx.bias_dtype = None if bias is None or bias.stop_gradient else bias.dtype
        ctx.has_bias, ctx.wants_x = bias is not None, not x.stop_gradient
        return product

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        weight, x = ctx.weight, ctx.x
        ctx.weight = ctx.x = None
        with paddle.amp.auto_cast(enable=False):
            add_weight_gradient(weight, x, upstream)
            dx = db = None
            if ctx.wants_x:
                values = weight.detach().astype(upstream.dtype)
                dx = paddle.matmul(upstream, values, transpose_y=True).astype(ctx.x_dtype)
            if ctx.bias_dtype is not None:
                db = upstream.reshape([-1, upstream.shape[-1]]).sum(0).astype(ctx.bias_dtype)
        return (dx, None, db) if ctx.has_bias else (dx, None)


def add_weight_gradient(weight: paddle.Tensor, x: paddle.Tensor, upstream: paddle.Tensor) -> None:
    """Add the gradient of ``x @ weight`` to the float32 ``weight.main_grad``, made where there is none."""
    weight.main_grad = _C_ops.fused_linear_param_grad_add(
        x,
        upstream,
        getattr(weight, "main_grad", None),
        None,  # no gradient of a bias
        True,  # in float32
        False,  # no bias
    )[0]
