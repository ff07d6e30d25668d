"""Products of activations and weights, with a backward pass in one part or in two.

The backward pass of a product has two halves: the gradient of its input, which the layers before it wait for,
and that of its weight, which nobody needs before the step's end. :class:`SplitProducts` leaves the second
half for later, when a pipeline rank would otherwise wait. Numbers do not change: each product is the one that
Paddle's backward pass would compute, and a weight's gradients are added in the order of the micro batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer


class Products:
    """Products whose backward pass is Paddle's."""

    def linear(
        self, x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None, name: Any = None
    ) -> paddle.Tensor:
        """``x [..., in] @ weight [in, out] + bias``; called as ``F.linear`` is, by Paddle's layers too."""
        return F.linear(x, weight, bias)

    def transposed(self, x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        """``x [..., in]`` times the transpose of ``weight [out, in]``."""
        return paddle.matmul(x, weight, transpose_y=True)


class SplitProducts(Products):
    """Products whose weights get their gradients in :meth:`run_next`, and no sooner.

    A weight may be computed from a parameter (rounded, cast): the rest of the way runs then too. Hooks on
    parameters are called as in any backward pass.
    """

    def __init__(self) -> None:
        self._open: list[_WeightGradient] = []
        self._waiting: deque[list[_WeightGradient]] = deque()

    @property
    def num_waiting(self) -> int:
        """Micro batches whose weights have not got their gradients."""
        return len(self._waiting)

    def linear(
        self, x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None, name: Any = None
    ) -> paddle.Tensor:
        if not _splits(x, weight):
            return super().linear(x, weight, bias)
        product = _InputGradient.apply(x, _Product(weight, False, self._open.append))
        return product if bias is None else product + bias.astype(product.dtype)

    def transposed(self, x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        if not _splits(x, weight):
            return super().transposed(x, weight)
        return _InputGradient.apply(x, _Product(weight, True, self._open.append))

    def begin(self) -> None:
        """Forget what a step that did not come to its end has left."""
        self._open.clear()
        self._waiting.clear()

    def end_backward(self) -> None:
        """The gradients of a micro batch's inputs are complete: those of its weights may be asked for."""
        self._waiting.append(list(self._open))
        self._open.clear()

    def run_next(self) -> None:
        """Gradients of weights of the micro batch that has waited longest."""
        work = self._waiting.popleft()
        with paddle.amp.auto_cast(enable=False):
            while work:
                _give_gradient(work.pop(0))


def _splits(x: paddle.Tensor, weight: paddle.Tensor) -> bool:
    """Whether a backward pass will come by that has two halves."""
    return paddle.is_grad_enabled() and not x.stop_gradient and not weight.stop_gradient


class _Product:
    """What a product's backward pass needs. No tensor to Paddle, so that no gradient is asked for."""

    def __init__(
        self, weight: paddle.Tensor, is_transposed: bool, leave: Callable[[_WeightGradient], None]
    ) -> None:
        self.weight, self.is_transposed, self.leave = weight, is_transposed, leave

    def multiply(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.is_transposed:
            return paddle.matmul(x, self.weight, transpose_y=True)
        return F.linear(x, self.weight)


class _WeightGradient:
    """The half that is left: the gradient of ``weight`` from the product's input and output gradient."""

    def __init__(
        self, weight: paddle.Tensor, is_transposed: bool, x: paddle.Tensor, upstream: paddle.Tensor
    ) -> None:
        self.weight, self.is_transposed, self.x, self.upstream = weight, is_transposed, x, upstream

    def compute(self) -> paddle.Tensor:
        x, upstream = (tensor.reshape([-1, tensor.shape[-1]]) for tensor in (self.x, self.upstream))
        left, right = (upstream, x) if self.is_transposed else (x, upstream)
        return _in(paddle.matmul(left, right, transpose_x=True), self.weight.dtype)


class _InputGradient(PyLayer):
    """A product that passes on the gradient of its input alone."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, product: _Product) -> paddle.Tensor:
        result = product.multiply(x)
        # The weight itself, not what it holds now: sharding stage 3 brings its values back for this pass.
        ctx.product, ctx.x, ctx.dtype = product, _in(x, result.dtype), x.dtype
        return result

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> paddle.Tensor:
        product, x = ctx.product, ctx.x
        ctx.product = ctx.x = None
        product.leave(_WeightGradient(product.weight, product.is_transposed, x, upstream))
        weight = _in(product.weight, upstream.dtype)
        return _in(paddle.matmul(upstream, weight, transpose_y=not product.is_transposed), ctx.dtype)


class _Given(PyLayer):
    """A number whose backward pass gives the weight its gradient, through whatever hangs on it."""

    @staticmethod
    def forward(ctx: Any, weight: paddle.Tensor, work: _WeightGradient) -> paddle.Tensor:
        ctx.work = work
        return paddle.zeros([])

    @staticmethod
    def backward(ctx: Any, _: paddle.Tensor) -> paddle.Tensor:
        work, ctx.work = ctx.work, None
        return work.compute()


def _give_gradient(work: _WeightGradient) -> None:
    weight = work.weight
    is_away = weight.is_leaf and not weight._is_initialized()  # sharding stage 3: its owner has the values
    if is_away:
        paddle.empty(weight.shape, weight.dtype)._share_buffer_to(weight)  # Paddle asks where it lies
    _Given.apply(weight, work).backward()
    if is_away and weight._is_initialized():
        weight._clear_data()


def _in(tensor: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)
