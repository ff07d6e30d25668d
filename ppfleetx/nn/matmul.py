"""Matmuls of activations and weights, with four independent options:

- ``cast_to``: multiply by a 16-bit copy of the weight, which is made once per step;
- :class:`Exchange`: overlap the communication among tensor-parallel ranks with the backward pass;
- ``fused``: add the weight's gradient to the float32 ``main_grad`` in one kernel, instead of to ``grad``;
- ``defers``: compute the weight's gradient after the backward pass (Qi et al., "Zero Bubble Pipeline
  Parallelism", 2023).

Only ``fused`` changes the results, because it skips a rounding to 16 bits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import _C_ops, distributed
from paddle.autograd import PyLayer
from paddle.base.framework import EagerParamBase

from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn.cpu_ops import bfloat16
from ppfleetx.nn.fused_ops import NO_FUSED_OPS, FusedOps

Finish = Callable[[], paddle.Tensor]
"""A function that waits for a started operation and returns its result."""


Counts = Sequence[int]
"""Number of rows of each group."""


class Exchange:
    """Communication among tensor-parallel ranks for a column-parallel matmul (Narayanan et al., 2021). In
    this base class, each rank has the whole input.

    Attributes:
        gathers_again: whether the input is gathered again in the backward pass instead of being kept; always
            False in this base class.
    """

    gathers_again = False

    def __init__(self, group: Any) -> None:
        self._group = group

    def whole(self, x: paddle.Tensor) -> paddle.Tensor:
        """Return the whole input of the matmul, gathered from the ranks if each rank holds only a part."""
        return self.start_whole(x)()

    def start_whole(self, x: paddle.Tensor) -> Finish:
        """Start to gather the matmul's input. Return a function that waits for the whole input and returns
        it."""
        return lambda: x

    def start_sum(self, gradient: paddle.Tensor) -> Finish:
        """Start to sum the input's gradient over the ranks. Return a function that waits for the sum and
        returns it, in the shape of this rank's input. The sum may be written into ``gradient``."""
        task = distributed.all_reduce(gradient, group=self._group, sync_op=False)
        return _finish(task, gradient)


class ScatteredInput(Exchange):
    """Communication for sequence parallelism: an all-gather of the input, and a reduce-scatter of the input's
    gradient (Korthikanti et al., 2022, section 4.2.2)."""

    def __init__(self, group: Any, *, gathers_again: bool) -> None:
        super().__init__(group)
        self.gathers_again = gathers_again

    def start_whole(self, x: paddle.Tensor) -> Finish:
        gathered = paddle.empty([x.shape[0] * self._group.nranks, *x.shape[1:]], x.dtype)
        task = distributed.stream.all_gather(gathered, x.detach(), group=self._group, sync_op=False)
        return _finish(task, gathered)

    def start_sum(self, gradient: paddle.Tensor) -> Finish:
        part = paddle.empty([gradient.shape[0] // self._group.nranks, *gradient.shape[1:]], gradient.dtype)
        task = distributed.stream.reduce_scatter(part, gradient, group=self._group, sync_op=False)
        return _finish(task, part, gradient)


def _finish(task: Any, result: paddle.Tensor, *_used: paddle.Tensor) -> Finish:
    """Return a function that waits for ``task`` and returns ``result``. The tensors ``_used`` stay in memory
    as long as the function exists."""

    def finish(_held: tuple[paddle.Tensor, ...] = _used) -> paddle.Tensor:
        task.wait()
        return result

    return finish


def column_exchange(ctx: ParallelContext, *, gathers_again: bool) -> Exchange:
    group = ctx.group_of("mp")
    if ctx.plan.sequence_parallel:
        return ScatteredInput(group, gathers_again=gathers_again)
    return Exchange(group)


class Matmul:
    """Computes the matmuls with the weights of one model.

    Args:
        cast_to: dtype to which weights and biases are cast once inside :meth:`kept`; None: they are not cast
            in advance.
        fused: the fused operators in use; only ``linear_grad_add`` matters here.
        defers: whether the gradients of weights are deferred until :meth:`run_next` is called.

    Attributes:
        uses: how often each option took effect (``weight_cast``, ``linear_grad_add``, ``overlapped``,
            ``deferred``), and the number of copies made (``casts``).
    """

    def __init__(
        self, *, cast_to: str | None = None, fused: FusedOps = NO_FUSED_OPS, defers: bool = False
    ) -> None:
        self._dtype = None if cast_to is None else getattr(paddle, cast_to)
        self._fused, self.defers = fused, defers
        self._copies: dict[int, paddle.Tensor] | None = None
        self._open: list[Callable[[], None]] = []
        self._waiting: deque[list[Callable[[], None]]] = deque()
        self.uses: Counter[str] = Counter()

    # -- matmuls

    def linear(
        self,
        x: paddle.Tensor,
        weight: paddle.Tensor,
        bias: paddle.Tensor | None = None,
        name: Any = None,
        *,
        is_transposed: bool = False,
        exchange: Exchange | None = None,
    ) -> paddle.Tensor:
        """Return ``x [..., in] @ weight [in, out] + bias``. The positional arguments are those of
        ``F.linear``.

        Args:
            is_transposed: whether the weight is stored as ``[out, in]``; there is then no bias.
            exchange: communication for a column-parallel weight; None: no communication. In the backward
                pass, the input's gradient is reduced over the ranks while the weight's gradient is computed.
        """
        if not paddle.in_dynamic_mode():  # while exporting
            return _product(x, weight, bias, is_transposed)
        on_cpu = bfloat16.in_autocast()
        weight = self._copy_or_parameter(weight)
        bias = None if bias is None else self._copy_or_parameter(bias)
        trains = paddle.is_grad_enabled() and not weight.stop_gradient
        adds = trains and self.adds_to_main_gradient(weight)
        goes_on = paddle.is_grad_enabled() and not x.stop_gradient
        defers, overlaps = self.defers and trains and goes_on, exchange is not None and goes_on
        if exchange is not None and not overlaps:
            x, exchange = exchange.whole(x), None
        if not (on_cpu or adds or defers or overlaps):
            return _product(x, weight, bias, is_transposed)
        self.uses["overlapped"] += overlaps
        if on_cpu:
            work = _CpuWork(weight, self.value(weight), is_transposed, exchange)
        else:
            work = _Work(weight, is_transposed, exchange, self._add if adds else None)
        return _Matmul.apply(x, bias, None if defers else weight, work, self._defer if defers else None)

    def leaf_value(self, parameter: paddle.Tensor) -> paddle.Tensor:
        """Return the detached value of a weight or bias, to pass to :meth:`apart`. It is the 16-bit copy if
        copies are kept (:meth:`kept`), except with bfloat16 on a CPU."""
        return parameter.detach() if bfloat16.in_autocast() else self.value(parameter)

    def apart(
        self,
        x: paddle.Tensor,
        leaf: paddle.Tensor,
        bias: paddle.Tensor | None,
        is_transposed: bool,
        parameter: paddle.Tensor,
    ) -> paddle.Tensor:
        """Return ``x @ leaf + bias``. ``leaf`` has the value of the weight ``parameter``
        (:meth:`leaf_value`), and gets the weight's gradient. ``parameter`` itself gets no gradient."""
        if bfloat16.in_autocast():
            return _Matmul.apply(
                x, bias, leaf, _CpuWork(leaf, self.value(parameter), is_transposed, None), None
            )
        product = paddle.matmul(x, leaf, transpose_y=is_transposed)
        return product if bias is None else product + bias

    def grouped(
        self,
        x: paddle.Tensor,
        weight: paddle.Tensor,
        bias: paddle.Tensor | None,
        counts: Counts,
    ) -> paddle.Tensor:
        """Multiply each row of ``x [rows, in]`` by the matrix of its group in ``weight [groups, in, out]``,
        and add the vector of its group in ``bias [groups, out]``.

        Args:
            x: rows, sorted by group.
            counts: number of rows in each group.
        """
        weight = self._copy_or_parameter(weight)
        bias = None if bias is None else self._copy_or_parameter(bias)
        trains = paddle.is_grad_enabled() and not weight.stop_gradient
        defers = self.defers and trains and not x.stop_gradient
        work = _GroupedWork(weight, counts)
        return _Matmul.apply(x, bias, None if defers else weight, work, self._defer if defers else None)

    # -- 16-bit copies of weights

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context manager that keeps 16-bit copies of weights for reuse. Parameters must not change inside
        it."""
        self._copies = {}
        try:
            yield
        finally:
            self._copies = None

    def value(self, parameter: paddle.Tensor) -> paddle.Tensor:
        """Return the 16-bit copy of ``parameter`` if copies are kept (:meth:`kept`), else the detached
        parameter."""
        # Only parameters have copies, because a computed tensor is freed after its matmul and its id is
        # reused.
        is_kept = self._dtype is not None and self._copies is not None
        if not is_kept or not isinstance(parameter, EagerParamBase) or parameter.dtype != paddle.float32:
            return parameter.detach()
        copy = self._copies.get(id(parameter))
        if copy is None:
            self.uses["casts"] += 1
            cast = bfloat16.cast if bfloat16.in_autocast() else partial(paddle.cast, dtype=self._dtype)
            copy = self._copies[id(parameter)] = cast(parameter.detach())
        self.uses["weight_cast"] += 1
        return copy

    def _copy_or_parameter(self, parameter: paddle.Tensor) -> paddle.Tensor:
        """Return the 16-bit copy of ``parameter`` if copies are kept (:meth:`kept`), else ``parameter``. In
        both cases, ``parameter`` gets the gradient."""
        if self._dtype is None or self._copies is None or bfloat16.in_autocast():
            return parameter  # in bfloat16 on a CPU, _CpuWork takes the copy
        value = self.value(parameter)
        return parameter if value.dtype == parameter.dtype else _Copy.apply(parameter, _Holder(value))

    # -- gradients in float32

    def adds_to_main_gradient(self, weight: paddle.Tensor) -> bool:
        """Return whether gradients of ``weight`` are added directly to its float32 ``main_grad``. Always
        False for a tensor that is computed from a parameter, such as a fake-quantized weight."""
        return weight.is_leaf and self._fused.takes("linear_grad_add", weight)

    def add_gradient(self, weight: paddle.Tensor, gradient: paddle.Tensor) -> None:
        """Add a float32 ``gradient`` to the weight's ``main_grad``."""
        self.uses["linear_grad_add"] += 1
        main = getattr(weight, "main_grad", None)
        weight.main_grad = gradient if main is None else main.add_(gradient)

    def _add(self, weight: paddle.Tensor, left: paddle.Tensor, right: paddle.Tensor) -> None:
        """Add ``left^T @ right`` to the float32 ``main_grad`` of ``weight`` with one fused kernel."""
        self.uses["linear_grad_add"] += 1
        main = getattr(weight, "main_grad", None)
        # True: accumulate in float32. False: no bias.
        weight.main_grad = _C_ops.fused_linear_param_grad_add(left, right, main, None, True, False)[0]

    # -- deferred gradients

    def begin(self) -> None:
        """Discard the deferred gradients of an earlier step that was interrupted."""
        self._open.clear()
        self._waiting.clear()

    def end_backward(self) -> None:
        """Mark the end of the backward pass of a micro batch. After this, :meth:`run_next` can compute the
        deferred weight gradients of the micro batch."""
        self._waiting.append(list(self._open))
        self._open.clear()

    def run_next(self) -> None:
        """Compute the deferred weight gradients of the oldest micro batch that still has some. Parameter
        hooks run as in an ordinary backward pass."""
        work = self._waiting.popleft()
        with paddle.amp.auto_cast(enable=False):
            while work:
                work.pop(0)()

    def when_complete(self, call: Callable[[], None]) -> None:
        """Call the function ``call`` once all weight gradients that this backward pass has reached so far are
        complete. Without deferred gradients, that is immediately. Otherwise, :meth:`run_next` calls the
        function after it has computed those gradients."""
        if self.defers:
            self._open.append(call)
        else:
            call()

    def _defer(self, rest: _WeightGradient) -> None:
        self.uses["deferred"] += 1
        self._open.append(partial(_compute_deferred, rest))


def _product(
    x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None, is_transposed: bool
) -> paddle.Tensor:
    if not is_transposed:
        return F.linear(x, weight, bias)
    assert bias is None
    return paddle.matmul(x, weight, transpose_y=True)


Add = Callable[[paddle.Tensor, paddle.Tensor, paddle.Tensor], None]


class _Work:
    """One matmul with one weight, with methods that compute the product and its gradients."""

    def __init__(
        self, weight: paddle.Tensor, is_transposed: bool, exchange: Exchange | None, add: Add | None
    ) -> None:
        self.weight, self.is_transposed, self.exchange, self.add = weight, is_transposed, exchange, add

    @property
    def gathers_again(self) -> bool:
        return self.exchange is not None and self.exchange.gathers_again

    def operand(self, x: paddle.Tensor) -> paddle.Tensor:
        """Convert the input to the dtype in which the matmul is computed."""
        return x

    def product(self, x: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
        return _product(x, self.weight, bias, self.is_transposed)

    def kept(self, x: paddle.Tensor, result: paddle.Tensor) -> paddle.Tensor:
        """Convert the input to the dtype in which it is kept until the weight's gradient is computed."""
        return in_dtype(x.detach(), result.dtype)

    def upstream(self, gradient: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor | None]:
        """Convert the upstream gradient to the dtype in which the backward matmuls are computed. Also return
        the bias gradient, or None if the conversion does not compute it."""
        return gradient, None

    def of_input(self, upstream: paddle.Tensor) -> paddle.Tensor:
        weight = in_dtype(self.weight.detach(), upstream.dtype)
        return paddle.matmul(upstream, weight, transpose_y=not self.is_transposed)

    def of_weight(self, x: paddle.Tensor, upstream: paddle.Tensor) -> paddle.Tensor | None:
        """Return the weight's gradient; None if it was added directly to the float32 ``main_grad``."""
        left, right = (upstream, x) if self.is_transposed else (x, upstream)
        if self.add is not None:
            self.add(self.weight, left, right)
            return None
        left, right = (tensor.reshape([-1, tensor.shape[-1]]) for tensor in (left, right))
        return paddle.matmul(left, right, transpose_x=True)

    def of_bias(self, upstream: paddle.Tensor) -> paddle.Tensor:
        return upstream.reshape([-1, upstream.shape[-1]]).sum(0)


class _CpuWork(_Work):
    """A matmul in bfloat16 on a CPU.

    Args:
        value: the weight's bfloat16 copy, or the float32 weight. A float32 weight is rounded in each matmul.
    """

    def __init__(
        self, weight: paddle.Tensor, value: paddle.Tensor, is_transposed: bool, exchange: Exchange | None
    ) -> None:
        super().__init__(weight, is_transposed, exchange, None)
        self._copy = value if value.dtype == paddle.bfloat16 else None

    def operand(self, x: paddle.Tensor) -> paddle.Tensor:
        return bfloat16.cast(x)

    def product(self, x: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
        return bfloat16.matmul(x, self._matrix(), bias, transpose_y=self.is_transposed)

    def kept(self, x: paddle.Tensor, result: paddle.Tensor) -> paddle.Tensor:
        return x

    def upstream(self, gradient: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor | None]:
        return bfloat16.cast_and_sum(gradient)

    def of_input(self, upstream: paddle.Tensor) -> paddle.Tensor:
        return bfloat16.matmul(upstream, self._matrix(), transpose_y=not self.is_transposed)

    def of_weight(self, x: paddle.Tensor, upstream: paddle.Tensor) -> paddle.Tensor:
        left, right = (upstream, x) if self.is_transposed else (x, upstream)
        left, right = (tensor.reshape([-1, tensor.shape[-1]]) for tensor in (left, right))
        return bfloat16.matmul(left, right, transpose_x=True)

    def _matrix(self) -> paddle.Tensor:
        return self.weight.detach() if self._copy is None else self._copy


class _GroupedWork(_Work):
    """One grouped matmul, with methods that compute the product and its gradients. Rows are sorted by group.
    Each row of ``x [rows, in]`` is multiplied by its group's matrix in ``weight [groups, in, out]``."""

    def __init__(self, weight: paddle.Tensor, counts: Counts) -> None:
        super().__init__(weight, False, None, None)
        self.counts = counts

    def product(self, x: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
        """Multiply the rows of each group by the group's matrix. The result has the dtype that ``F.linear``
        returns under ``auto_cast``."""
        # Find the dtype by multiplying two numbers, because it depends on auto_cast's level and lists.
        dtype = F.linear(*(paddle.zeros([1, 1], tensor.dtype) for tensor in (x, self.weight))).dtype
        with paddle.amp.auto_cast(enable=False):
            x, result = in_dtype(x, dtype), paddle.empty([x.shape[0], self.weight.shape[-1]], dtype)
            for group, begin, end in self._spans():
                rows = result._slice(begin, end)
                _multiply(x._slice(begin, end), in_dtype(_of_group(self.weight, group), dtype), rows)
                if bias is not None:
                    rows.add_(in_dtype(_of_group(bias, group), dtype).expand_as(rows))
        return result

    def of_input(self, upstream: paddle.Tensor) -> paddle.Tensor:
        result = paddle.empty([upstream.shape[0], self.weight.shape[1]], upstream.dtype)
        for group, begin, end in self._spans():
            matrix = in_dtype(_of_group(self.weight, group), upstream.dtype)
            _multiply(upstream._slice(begin, end), matrix, result._slice(begin, end), transpose_y=True)
        return result

    def of_weight(self, x: paddle.Tensor, upstream: paddle.Tensor) -> paddle.Tensor:
        result = paddle.empty([len(self.counts), x.shape[-1], upstream.shape[-1]], upstream.dtype)
        for group, begin, end in self._spans():
            rows = x._slice(begin, end), upstream._slice(begin, end)
            _multiply(*rows, _of_group(result, group), transpose_x=True)
        return self._with_zeros(result)

    def of_bias(self, upstream: paddle.Tensor) -> paddle.Tensor:
        result = paddle.empty([len(self.counts), upstream.shape[-1]], upstream.dtype)
        for group, begin, end in self._spans():
            paddle.assign(upstream._slice(begin, end).sum(0), _of_group(result, group))
        return self._with_zeros(result)

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        end = 0
        for group, count in enumerate(self.counts):
            begin, end = end, end + int(count)
            if end > begin:
                yield group, begin, end

    def _with_zeros(self, result: paddle.Tensor) -> paddle.Tensor:
        for group, count in enumerate(self.counts):
            if not count:
                _of_group(result, group).zero_()
        return result


def _multiply(x: paddle.Tensor, y: paddle.Tensor, out: paddle.Tensor, **transposes: bool) -> None:
    if bfloat16.in_autocast():
        paddle.assign(bfloat16.matmul(x, y, **transposes), out)
    else:
        paddle.matmul(x, y, out=out, **transposes)


def _of_group(tensor: paddle.Tensor, group: int) -> paddle.Tensor:
    """Return ``tensor[group]`` as a view, without autograd."""
    return tensor.detach()._slice(group, group + 1).reshape_(tensor.shape[1:])


class _WeightGradient:
    """Computes a weight's gradient from the input ``x`` and the upstream gradient, immediately or later."""

    def __init__(self, work: _Work, x: paddle.Tensor, upstream: paddle.Tensor) -> None:
        self.work, self.x, self.upstream = work, x, upstream

    def compute(self) -> paddle.Tensor | None:
        """Return the weight's gradient; None if it was added directly to the float32 ``main_grad``."""
        gradient = self.work.of_weight(self.x, self.upstream)
        return None if gradient is None else in_dtype(gradient, self.work.weight.dtype)


class _Matmul(PyLayer):
    """Autograd function of a matmul. Its backward pass can defer the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: paddle.Tensor,
        bias: paddle.Tensor | None,
        weight: paddle.Tensor | None,
        work: _Work,
        defer: Callable[[_WeightGradient], None] | None,
    ) -> paddle.Tensor:
        whole = x if work.exchange is None else work.exchange.whole(x)
        whole = work.operand(whole)
        result = work.product(whole, bias)
        ctx.tensors = (bias is not None, weight is not None)
        ctx.wants_x, ctx.x_dtype = not x.stop_gradient, x.dtype
        ctx.bias_dtype = None if bias is None or bias.stop_gradient else bias.dtype
        # Keep the weight, not its values, because sharding stage 3 frees the values and fetches them again
        # for the backward pass.
        ctx.work, ctx.defer = work, defer
        ctx.x = x.detach() if work.gathers_again else work.kept(whole, result)
        return result

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        with paddle.amp.auto_cast(enable=False):
            work = ctx.work
            upstream, of_bias = work.upstream(upstream)
            of_input, of_weight = _backward(ctx, upstream)
            has_bias, has_weight = ctx.tensors
            gradients = [of_input]
            if has_bias:
                if ctx.bias_dtype is None:  # a frozen bias
                    of_bias = None
                elif of_bias is None:
                    of_bias = in_dtype(in_dtype(work.of_bias(upstream), upstream.dtype), ctx.bias_dtype)
                gradients.append(of_bias)
            if has_weight:
                gradients.append(of_weight)
        return tuple(gradients)


def _backward(ctx: Any, upstream: paddle.Tensor) -> tuple[paddle.Tensor | None, paddle.Tensor | None]:
    """Compute the backward pass of a matmul. Return the gradients of the input and of the weight. The
    weight's gradient is computed while the input's gradient is being reduced over the ranks."""
    work, x = ctx.work, ctx.x
    ctx.work = ctx.x = None
    gathering = work.exchange.start_whole(x) if work.gathers_again else None
    of_input = finish = None
    if ctx.wants_x:
        of_input = in_dtype(work.of_input(upstream), ctx.x_dtype)
    if gathering is not None:
        x = in_dtype(gathering(), upstream.dtype)
    if work.exchange is not None:
        # One sum runs at a time, at a fixed point of the program, so all ranks start sums in the same order.
        finish = work.exchange.start_sum(of_input)
    of_weight = None
    if not work.weight.stop_gradient:
        rest = _WeightGradient(work, x, upstream)
        of_weight = rest.compute() if ctx.defer is None else ctx.defer(rest)
    return (of_input if finish is None else finish()), of_weight


class _DeferredGradient(PyLayer):
    """Autograd function that computes a weight's deferred gradient in its backward pass, so that the weight's
    hooks run as usual. The forward pass computes nothing."""

    @staticmethod
    def forward(ctx: Any, weight: paddle.Tensor, rest: _WeightGradient) -> paddle.Tensor:
        ctx.rest = rest
        return paddle.zeros([])

    @staticmethod
    def backward(ctx: Any, _: paddle.Tensor) -> paddle.Tensor | None:
        rest, ctx.rest = ctx.rest, None
        return rest.compute()


def _compute_deferred(rest: _WeightGradient) -> None:
    weight = rest.work.weight
    is_away = weight.is_leaf and not weight._is_initialized()  # stage 3: only the owner has the values
    if is_away:
        paddle.empty(weight.shape, weight.dtype)._share_buffer_to(weight)  # Paddle reads the weight's device
    with paddle.enable_grad():
        _DeferredGradient.apply(weight, rest).backward()
    if is_away and weight._is_initialized():
        weight._clear_data()


class _Holder:
    """Wraps a tensor to hide it from autograd."""

    # Without the wrapper, autograd would treat a result that shares memory with a tensor argument as an
    # in-place change.

    def __init__(self, copy: paddle.Tensor) -> None:
        self.copy = copy


class _Copy(PyLayer):
    """Autograd function that replaces a parameter with its 16-bit copy, and casts the gradient back."""

    @staticmethod
    def forward(ctx: Any, parameter: paddle.Tensor, holder: _Holder) -> paddle.Tensor:
        ctx.dtype, ctx.wanted = parameter.dtype, not parameter.stop_gradient
        return holder.copy.detach()

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> paddle.Tensor | None:
        return upstream.astype(ctx.dtype) if ctx.wanted else None


def in_dtype(tensor: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)
