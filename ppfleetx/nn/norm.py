"""Normalisation over the last dimension."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import nn


class LayerNorm(nn.Layer):
    """Layer normalisation (Ba et al., 2016) with gain and bias of shape ``[size]``."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter([size], default_initializer=nn.initializer.Constant(1.0))
        self.bias = self.create_parameter([size], is_bias=True)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Layer):
    """Root-mean-square normalisation (Zhang and Sennrich, 2019) with a gain of shape ``[size]``.

    The mean square is taken in float32 whatever the input's type.
    """

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter([size], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x32 = x.astype("float32")
        inverse = paddle.rsqrt(x32.square().mean(-1, keepdim=True) + self.epsilon)
        return (x32 * inverse).astype(x.dtype) * self.weight
