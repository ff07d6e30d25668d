"""Products of activations and weights, with a backward pass in one part or in two.

The backward pass of a product has two halves: the gradient of its input, which the layers before it wait for,
and that of its weight, which nobody needs before the step's end. :class:`SplitProducts` leaves the second
half for later, when a pipeline rank would otherwise wait; :meth:`Products.column` computes it while the first
half travels. Numbers do not change: each product is the one that
Paddle's backward pass would compute, a bias is added before the product is rounded to 16 bits, and a weight's
gradients are added in the order of the micro batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

Finish = Callable[[], paddle.Tensor]
"""Waits for what was started, and gives its result."""


class Exchange(Protocol):
    """What tensor-parallel ranks exchange around the product of each with its columns of a weight.

    Attributes:
        gathers_again: the whole input is not kept for the backward pass.
    """

    gathers_again: bool

    def whole(self, x: paddle.Tensor) -> paddle.Tensor:
        """The product's input from what this rank holds of it."""

    def start_whole(self, x: paddle.Tensor) -> Finish:
        """Start :meth:`whole`."""

    def start_sum(self, gradient: paddle.Tensor) -> Finish:
        """Start the sum over the ranks of the input's gradient; this rank gets its part of it."""


class Products:
    """Products whose backward pass is Paddle's, but for what the ranks exchange in :meth:`column`."""

    def linear(
        self, x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None, name: Any = None
    ) -> paddle.Tensor:
        """``x [..., in] @ weight [in, out] + bias``; called as ``F.linear`` is, by Paddle's layers too."""
        return F.linear(x, weight, bias)

    def transposed(self, x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        """``x [..., in]`` times the transpose of ``weight [out, in]``."""
        return paddle.matmul(x, weight, transpose_y=True)

    def column(
        self,
        x: paddle.Tensor,
        weight: paddle.Tensor,
        bias: paddle.Tensor | None,
        exchange: Exchange,
        *,
        is_transposed: bool = False,
    ) -> paddle.Tensor:
        """The product with this rank's columns. The sum of the input's gradient over the ranks travels while
        the weight's gradient is computed."""
        if paddle.is_grad_enabled() and not x.stop_gradient:
            return self._column(x, bias, _Product(weight, is_transposed, exchange))
        x = exchange.whole(x)
        return self.transposed(x, weight) if is_transposed else self.linear(x, weight, bias)

    def _column(self, x: paddle.Tensor, bias: paddle.Tensor | None, product: _Product) -> paddle.Tensor:
        return _BothGradients.apply(x, bias, product.weight, product)


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
        return _InputGradient.apply(x, bias, _Product(weight, False), self._open.append)

    def transposed(self, x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        if not _splits(x, weight):
            return super().transposed(x, weight)
        return _InputGradient.apply(x, None, _Product(weight, True), self._open.append)

    def _column(self, x: paddle.Tensor, bias: paddle.Tensor | None, product: _Product) -> paddle.Tensor:
        return _InputGradient.apply(x, bias, product, self._open.append)

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

    def __init__(self, weight: paddle.Tensor, is_transposed: bool, exchange: Exchange | None = None) -> None:
        self.weight, self.is_transposed, self.exchange = weight, is_transposed, exchange

    @property
    def gathers_again(self) -> bool:
        return self.exchange is not None and self.exchange.gathers_again

    def multiply(self, x: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
        if self.is_transposed:
            assert bias is None
            return paddle.matmul(x, self.weight, transpose_y=True)
        return F.linear(x, self.weight, bias)


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


def _forward(ctx: Any, x: paddle.Tensor, bias: paddle.Tensor | None, product: _Product) -> paddle.Tensor:
    """The product; ``ctx`` keeps what its backward pass needs."""
    whole = x if product.exchange is None else product.exchange.whole(x)
    result = product.multiply(whole, bias)
    ctx.has_bias = bias is not None
    ctx.bias_dtype = None if bias is None or bias.stop_gradient else bias.dtype
    # The weight itself, not what it holds now: sharding stage 3 brings its values back for the backward pass.
    ctx.product, ctx.dtype = product, x.dtype
    ctx.x = x if product.gathers_again else _in(whole, result.dtype)
    return result


def _backward(ctx: Any, upstream: paddle.Tensor, second: Callable[[_WeightGradient], Any]) -> tuple[Any, Any]:
    """The gradient of the input, and what ``second`` makes of the other half while that one travels."""
    product, x = ctx.product, ctx.x
    ctx.product = ctx.x = None
    gathering = product.exchange.start_whole(x) if product.gathers_again else None
    weight = _in(product.weight, upstream.dtype)
    gradient = _in(paddle.matmul(upstream, weight, transpose_y=not product.is_transposed), ctx.dtype)
    if gathering is not None:
        x = _in(gathering(), upstream.dtype)
    finish = None if product.exchange is None else product.exchange.start_sum(gradient)
    found = None
    if not product.weight.stop_gradient:
        found = second(_WeightGradient(product.weight, product.is_transposed, x, upstream))
    return (gradient if finish is None else finish()), found


def _of_bias(ctx: Any, upstream: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
    """The gradient of the bias: of no tensor where there is none, and none where it is frozen."""
    if not ctx.has_bias:
        return ()
    if ctx.bias_dtype is None:
        return (None,)
    total = upstream.reshape([-1, upstream.shape[-1]]).sum(0)
    return (_in(_in(total, upstream.dtype), ctx.bias_dtype),)


class _InputGradient(PyLayer):
    """A product that passes on the gradients of its input and bias, and leaves the other to ``leave``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: paddle.Tensor,
        bias: paddle.Tensor | None,
        product: _Product,
        leave: Callable[[_WeightGradient], None],
    ) -> paddle.Tensor:
        ctx.leave = leave
        return _forward(ctx, x, bias, product)

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        gradient, _ = _backward(ctx, upstream, ctx.leave)
        return (gradient, *_of_bias(ctx, upstream))


class _BothGradients(PyLayer):
    """A product that passes on all gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: paddle.Tensor, bias: paddle.Tensor | None, weight: paddle.Tensor, product: _Product
    ) -> paddle.Tensor:
        return _forward(ctx, x, bias, product)

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        gradient, found = _backward(ctx, upstream, _WeightGradient.compute)
        return (gradient, *_of_bias(ctx, upstream), found)


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
    with paddle.enable_grad():
        _Given.apply(weight, work).backward()
    if is_away and weight._is_initialized():
        weight._clear_data()


def _in(tensor: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)
