"""Weights that are converted to 16 bits once a step.

At O1 parameters are float32, and ``auto_cast`` converts each of them before every product, in each micro
batch and where it is recomputed. Between two updates the result is always the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle.autograd import PyLayer
from paddle.base.framework import EagerParamBase

from ppfleetx.nn.products import Products


class CastOnceProducts(Products):
    """Products that keep 16-bit copies of weights and biases while :meth:`kept` is entered.

    Args:
        dtype: the type, ``float16`` or ``bfloat16``.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = getattr(paddle, dtype)
        self._copies: dict[int, paddle.Tensor] | None = None
        self.num_casts = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around passes that nothing updates a parameter in; the copies are gone afterwards."""
        self._copies = {}
        try:
            yield
        finally:
            self._copies = None

    def linear(
        self, x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None, name: Any = None
    ) -> paddle.Tensor:
        return super().linear(x, self.low(weight), None if bias is None else self.low(bias))

    def transposed(self, x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        return super().transposed(x, self.low(weight))

    def low(self, parameter: paddle.Tensor) -> paddle.Tensor:
        """``parameter`` in 16 bits, with a way back for its gradient; itself where nothing is kept.

        Only parameters have copies. What is computed from one (a weight that is rounded) is gone after its
        product, and the next tensor may be given its ``id``.
        """
        is_kept = self._copies is not None and isinstance(parameter, EagerParamBase)
        if not is_kept or parameter.dtype != paddle.float32:
            return parameter
        copy = self._copies.get(id(parameter))
        if copy is None:
            self.num_casts += 1
            copy = self._copies[id(parameter)] = parameter.detach().astype(self.dtype)
        return _Copy.apply(parameter, _Holder(copy))


class _Holder:
    """No tensor to Paddle, which would take a result that shares an argument's memory for a change of it."""

    def __init__(self, copy: paddle.Tensor) -> None:
        self.copy = copy


class _Copy(PyLayer):
    """A copy that exists; its gradient is converted to the parameter's type, as that of a conversion is."""

    @staticmethod
    def forward(ctx: Any, parameter: paddle.Tensor, holder: _Holder) -> paddle.Tensor:
        ctx.dtype, ctx.wanted = parameter.dtype, not parameter.stop_gradient
        return holder.copy.detach()

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> paddle.Tensor | None:
        return upstream.astype(ctx.dtype) if ctx.wanted else None
