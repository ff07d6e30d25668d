"""Layers made of plain operators: linear layers, the vocabulary-parallel embedding, dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import paddle
import paddle.nn.functional as F
from paddle import nn

from ppfleetx.distributed.device import lacks_kernel
from ppfleetx.distributed.random import sliced_stream
from ppfleetx.nn.cpu_ops import bfloat16
from ppfleetx.nn.matmul import Counts, Matmul


class Linear(nn.Layer):
    """A linear layer, ``x @ weight + bias`` with ``weight [in, out]``.

    Attributes:
        linear: the function that computes the matmul. Paddle's parallel layers use the same attribute name.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.linear = Matmul().linear
        zeros = nn.initializer.Constant(0.0)  # the real values come from build_stage
        self.weight = self.create_parameter([in_features, out_features], default_initializer=zeros)
        self.bias = self.create_parameter([out_features], is_bias=True) if bias else None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.bias is not None and trains_on_cpu(x) and not bfloat16.in_autocast():
            return _add_bias(self.linear(x, self.weight), self.bias)
        return self.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in={self.weight.shape[0]}, out={self.weight.shape[1]}, bias={self.bias is not None}"


class GroupedLinear(nn.Layer):
    """A linear layer per group of rows: ``x @ weight[g] + bias[g]`` for group ``g``.

    Args:
        weight: shape of this rank's weight, ``[groups, in, out]``.
        bias: shape of this rank's bias; None: there is no bias.
    """

    def __init__(self, weight: Sequence[int], bias: Sequence[int] | None, matmul: Matmul) -> None:
        super().__init__()
        self.matmul = matmul
        zeros = nn.initializer.Constant(0.0)  # the real values come from build_stage
        self.weight = self.create_parameter(list(weight), default_initializer=zeros)
        self.bias = None if bias is None else self.create_parameter(list(bias), is_bias=True)

    def forward(self, x: paddle.Tensor, counts: Counts, *, adds_bias: bool = True) -> paddle.Tensor:
        """Map ``x [rows, in]``, sorted by group, to ``[rows, out]``. ``counts`` has the number of rows of
        each group."""
        return self.matmul.grouped(x, self.weight, self.bias if adds_bias else None, counts)

    def extra_repr(self) -> str:
        groups, width_in, width_out = self.weight.shape
        return f"groups={groups}, in={width_in}, out={width_out}, bias={self.bias is not None}"


def trains_on_cpu(x: paddle.Tensor) -> bool:
    """Return whether ``x`` is on a CPU and gradients are enabled. In this case, operators with a faster
    backward pass are used. Always False during an export."""
    return paddle.in_dynamic_mode() and paddle.is_grad_enabled() and x.place.is_cpu_place()


def _add_bias(x: paddle.Tensor, bias: paddle.Tensor) -> paddle.Tensor:
    """Return ``x + bias``. The bias gradient is computed as a matrix-vector product, which is fast on a
    CPU."""
    width = bias.shape[0]
    rows = x.reshape([-1, width])
    # Bitwise equal to a broadcast, whose gradient is Paddle's slow column sum.
    spread = paddle.matmul(paddle.ones([rows.shape[0], 1], dtype=bias.dtype), bias.unsqueeze(0))
    return (rows + spread).reshape(x.shape)


def add_smaller(x: paddle.Tensor, smaller: paddle.Tensor) -> paddle.Tensor:
    """Return ``x + smaller``, for passes without gradients. ``smaller`` is broadcast to ``x``."""
    # Paddle's CPU kernel is up to ten times slower with a broadcast. GPUs do not support expanding float16.
    if not paddle.in_dynamic_mode() or (x.place.is_cpu_place() and x.shape != smaller.shape):
        smaller = smaller.expand_as(x)
    return x + smaller


class VocabParallelEmbedding(nn.Layer):
    """A word embedding whose rows are divided over the tensor-parallel ranks.

    Args:
        shape: shape of this rank's part of the table.
        join: sums the results of the ranks.
    """

    # Not Paddle's own layer, which copies the whole table in each pass on a plugin's device.

    def __init__(
        self, shape: Sequence[int], *, rank: int, join: Callable[[paddle.Tensor], paddle.Tensor]
    ) -> None:
        super().__init__()
        self.rank, self.join = rank, join
        self.weight = self.create_parameter(list(shape), default_initializer=nn.initializer.Constant(0.0))

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        rows, is_here = local_rows(tokens, self.weight.shape[0], self.rank)
        return self.join(F.embedding(rows, self.weight) * is_here.astype(self.weight.dtype))


def local_rows(tokens: paddle.Tensor, num_rows: int, rank: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the row of each token in this rank's part of the embedding table, and whether the token belongs
    to this part (``[..., 1]``). Tokens that belong to other ranks get an arbitrary row."""
    first = rank * num_rows
    is_here = paddle.logical_and(tokens >= first, tokens < first + num_rows)
    # Other tokens get different rows: a GPU is slow to add many gradients to one row, even zeros.
    return tokens % num_rows, is_here.unsqueeze(-1)


class Dropout(nn.Dropout):
    """Dropout that returns its input unchanged in evaluation or with probability 0."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if not self.training or self.p == 0:
            return x
        if lacks_kernel("dropout", x):
            return super().forward(x.astype("float32")).astype(x.dtype)
        return super().forward(x)


class NoDropout:
    """A callable that returns its input, for layers that are never trained."""

    p, training = 0.0, False

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        return x


class SlicedDropout(Dropout):
    """Dropout of activations that are sliced over tensor-parallel ranks: each rank draws its own mask."""

    stream = staticmethod(sliced_stream)
    """Context manager in which random numbers come from this rank's own stream. Kernels with built-in dropout
    also use it."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if not self.training or self.p == 0:
            return x
        with self.stream():
            return super().forward(x)
