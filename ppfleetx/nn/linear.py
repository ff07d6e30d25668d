"""Linear layers that are not sliced: plain ones, and grouped ones with a matrix per group of rows."""

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
        linear: the function that computes the product. Paddle's own parallel layers have it under the same
            name.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.linear = Matmul().linear
        zeros = nn.initializer.Constant(0.0)  # the real values come from build_stage
        self.weight = self.create_parameter([in_features, out_features], default_initializer=zeros)
        self.bias = self.create_parameter([out_features], is_bias=True) if bias else None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map ``x [..., in]`` to ``[..., out]``."""
        if self.bias is not None and trains_on_cpu(x) and not bfloat16.are_entered():
            return _add_bias(self.linear(x, self.weight), self.bias)
        return self.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in={self.weight.shape[0]}, out={self.weight.shape[1]}, bias={self.bias is not None}"


class GroupedLinear(nn.Layer):
    """A linear layer per group of rows: ``x @ weight[g] + bias[g]`` with ``weight [groups, in, out]``.

    Args:
        weight, bias: shapes on this rank; None: there is no bias.
        matmul: multiplies by the weight.
    """

    def __init__(self, weight: Sequence[int], bias: Sequence[int] | None, matmul: Matmul) -> None:
        super().__init__()
        self.matmul = matmul
        zeros = nn.initializer.Constant(0.0)  # the real values come from build_stage
        self.weight = self.create_parameter(list(weight), default_initializer=zeros)
        self.bias = None if bias is None else self.create_parameter(list(bias), is_bias=True)

    def forward(self, x: paddle.Tensor, counts: Counts, *, adds_bias: bool = True) -> paddle.Tensor:
        """Map ``x [n, in]``, sorted into groups of ``counts`` rows, to ``[n, out]``."""
        return self.matmul.grouped(x, self.weight, self.bias if adds_bias else None, counts)

    def extra_repr(self) -> str:
        groups, width_in, width_out = self.weight.shape
        return f"groups={groups}, in={width_in}, out={width_out}, bias={self.bias is not None}"


def trains_on_cpu(x: paddle.Tensor) -> bool:
    """Whether to use the formulation whose backward pass is faster with Paddle's CPU kernels.

    It is False while a program is exported, which should have plain operators.
    """
    return paddle.in_dynamic_mode() and paddle.is_grad_enabled() and x.place.is_cpu_place()


def _add_bias(x: paddle.Tensor, bias: paddle.Tensor) -> paddle.Tensor:
    """Compute ``x + bias``, bit for bit, but expand the bias to all rows by a matrix product.

    The gradient of a broadcast sum is a column sum, for which Paddle's CPU kernel takes up to half as long as
    for the matrix product. As the gradient of a product with ones, it is a matrix-vector product.
    """
    width = bias.shape[0]
    rows = x.reshape([-1, width])
    spread = paddle.matmul(paddle.ones([rows.shape[0], 1], dtype=bias.dtype), bias.unsqueeze(0))
    return (rows + spread).reshape(x.shape)


def add_smaller(x: paddle.Tensor, smaller: paddle.Tensor) -> paddle.Tensor:
    """Add ``smaller``, broadcast to the shape of ``x``, in passes without gradients.

    Paddle's CPU kernel takes up to ten times as long to add tensors of different shapes, so there ``smaller``
    is expanded first. Its GPU kernel does not, and cannot expand float16.
    """
    if not paddle.in_dynamic_mode() or (x.place.is_cpu_place() and x.shape != smaller.shape):
        smaller = smaller.expand_as(x)
    return x + smaller
