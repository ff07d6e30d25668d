"""Products of rows that are sorted into groups, where each group has its own matrix.

``x [n, in]`` has ``counts[g]`` rows of group g, and ``weight`` is ``[groups, in, out]``. Products are written
directly into the rows of one result, and gradients into the matrices of one gradient, so there are no
temporary copies. A group without rows gets a gradient of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import paddle
import paddle.nn.functional as F

from ppfleetx.nn.cpu_ops import bfloat16

Counts = Sequence[int]


def product(
    x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None, counts: Counts
) -> paddle.Tensor:
    """Multiply ``x [n, in]`` to ``[n, out]``, in the same type as a linear would, and add
    ``bias [groups, out]``."""
    # Mixed precision depends on lists and levels, so the product of two numbers shows the type.
    dtype = F.linear(*(paddle.zeros([1, 1], tensor.dtype) for tensor in (x, weight))).dtype
    with paddle.amp.auto_cast(enable=False):
        x, result = _in(x, dtype), paddle.empty([x.shape[0], weight.shape[-1]], dtype)
        for group, begin, end in _spans(counts):
            rows = result._slice(begin, end)
            _multiply(x._slice(begin, end), _in(_of(weight, group), dtype), rows)
            if bias is not None:
                rows.add_(_in(_of(bias, group), dtype).expand_as(rows))
    return result


def input_gradient(upstream: paddle.Tensor, weight: paddle.Tensor, counts: Counts) -> paddle.Tensor:
    result = paddle.empty([upstream.shape[0], weight.shape[1]], upstream.dtype)
    for group, begin, end in _spans(counts):
        matrix = _in(_of(weight, group), upstream.dtype)
        _multiply(upstream._slice(begin, end), matrix, result._slice(begin, end), transpose_y=True)
    return result


def weight_gradient(x: paddle.Tensor, upstream: paddle.Tensor, counts: Counts) -> paddle.Tensor:
    result = paddle.empty([len(counts), x.shape[-1], upstream.shape[-1]], upstream.dtype)
    for group, begin, end in _spans(counts):
        rows = x._slice(begin, end), upstream._slice(begin, end)
        _multiply(*rows, _of(result, group), transpose_x=True)
    _clear_empty(result, counts)
    return result


def bias_gradient(upstream: paddle.Tensor, counts: Counts) -> paddle.Tensor:
    result = paddle.empty([len(counts), upstream.shape[-1]], upstream.dtype)
    for group, begin, end in _spans(counts):
        paddle.assign(upstream._slice(begin, end).sum(0), _of(result, group))
    _clear_empty(result, counts)
    return result


def _multiply(x: paddle.Tensor, y: paddle.Tensor, out: paddle.Tensor, **transposes: bool) -> None:
    if bfloat16.are_entered():
        paddle.assign(bfloat16.matmul(x, y, **transposes), out)
    else:
        paddle.matmul(x, y, out=out, **transposes)


def _spans(counts: Counts) -> Iterator[tuple[int, int, int]]:
    """Yield each group that has rows, with the range of its rows."""
    end = 0
    for group, count in enumerate(counts):
        begin, end = end, end + int(count)
        if end > begin:
            yield group, begin, end


def _of(tensor: paddle.Tensor, group: int) -> paddle.Tensor:
    """The part of a tensor that belongs to one group, as a view."""
    return tensor.detach()._slice(group, group + 1).reshape_(tensor.shape[1:])


def _clear_empty(tensor: paddle.Tensor, counts: Counts) -> None:
    for group, count in enumerate(counts):
        if not count:
            _of(tensor, group).zero_()


def _in(tensor: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)
