"""Linear layers of one card: plain ones, and grouped ones with a matrix per group of rows."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import nn

from ppfleetx.nn.cpu_ops import bfloat16
from ppfleetx.nn.grouped_matmul import Counts
from ppfleetx.nn.matmul import Matmul


class Linear(nn.Layer):
    """A linear layer, ``x @ weight + bias`` with ``weight [in, out]``.

    Attributes:
        linear: computes it; what Paddle's own parallel layers call by this name.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.linear = Matmul().linear
        zeros = nn.initializer.Constant(0.0)  # the real values come from build_stage
        self.weight = self.create_parameter([in_features, out_features], default_initializer=zeros)
        self.bias = self.create_parameter([out_features], is_bias=True) if bias else None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """``x [..., in]`` to ``[..., out]``."""
        if self.bias is not None and trains_on_cpu(x) and not bfloat16.are_entered():
            return _add_bias(self.linear(x, self.weight), self.bias)
        return self.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in={self.weight.shape[0]}, out={self.weight.shape[1]}, bias={self.bias is not None}"


class GroupedLinear(nn.Layer):
    """A linear layer per group of rows: ``x @ weight[g] + bias[g]`` with ``weight [groups, in, out]``.

    Args:
        weight, bias: their shapes here; None: there is no bias.
        matmul: multiplies by the weight.
    """

    def __init__(self, weight: Sequence[int], bias: Sequence[int] | None, matmul: Matmul) -> None:
        super().__init__()
        self.matmul = matmul
        zeros = nn.initializer.Constant(0.0)  # the real values come from build_stage
        self.weight = self.create_parameter(list(weight), default_initializer=zeros)
        self.bias = None if bias is None else self.create_parameter(list(bias), is_bias=True)

    def forward(self, x: paddle.Tensor, counts: Counts, *, adds_bias: bool = True) -> paddle.Tensor:
        """``x [n, in]``, in groups of ``counts`` rows, to ``[n, out]``."""
        return self.matmul.grouped(x, self.weight, self.bias if adds_bias else None, counts)

    def extra_repr(self) -> str:
        groups, width_in, width_out = self.weight.shape
        return f"groups={groups}, in={width_in}, out={width_out}, bias={self.bias is not None}"


def trains_on_cpu(x: paddle.Tensor) -> bool:
    """Whether to use the formulation with the faster backward pass in Paddle's CPU kernels.

    False while a program is exported: there the plain operators are wanted.
    """
    return paddle.in_dynamic_mode() and paddle.is_grad_enabled() and x.place.is_cpu_place()


def _add_bias(x: paddle.Tensor, bias: paddle.Tensor) -> paddle.Tensor:
    """``x + bias``, bit for bit, with the bias spread over the rows by a matrix product.

    The gradient of a broadcast sum is a column sum, which Paddle's CPU kernel takes up to half the time
    of the matrix product for; as the gradient of a product with ones it is a matrix-vector product.
    """
    width = bias.shape[0]
    rows = x.reshape([-1, width])
    spread = paddle.matmul(paddle.ones([rows.shape[0], 1], dtype=bias.dtype), bias.unsqueeze(0))
    return (rows + spread).reshape(x.shape)


def add_smaller(x: paddle.Tensor, smaller: paddle.Tensor) -> paddle.Tensor:
    """Add ``smaller``, broadcast to the shape of ``x``, in passes without gradients.

    Paddle's CPU kernel takes up to ten times as long to add tensors of different shapes. Its GPU kernel does
    not, and has no float16 expansion.
    """
    if not paddle.in_dynamic_mode() or (x.place.is_cpu_place() and x.shape != smaller.shape):
        smaller = smaller.expand_as(x)
    return x + smaller
