"""Collectives on many tensors at once, and differentiable collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import paddle
from paddle import distributed
from paddle.autograd import PyLayer

BUCKET_BYTES = 64 << 20
"""Tensors are packed into buckets of up to this size, for few messages and little extra memory."""

ALIGNMENT = 256
"""Tensors within a flat tensor start at multiples of this many bytes, as separately allocated tensors do.
Multi-tensor kernels use vector loads without checking the alignment."""


def aligned_offsets(sizes: Iterable[int], itemsize: int) -> tuple[list[int], int]:
    """Return the offsets, in elements, of parts with these ``sizes`` in an aligned flat tensor, and the end
    of the last part.

    >>> aligned_offsets([3, 64, 65, 1], 4) ([0, 64, 128, 256], 257)
    """
    step, begins, end = ALIGNMENT // itemsize, [], 0
    for size in sizes:
        begins.append(-(-end // step) * step)
        end = begins[-1] + size
    return begins, end


def all_reduce_packed(tensors: Sequence[paddle.Tensor], group: Any) -> None:
    """Sum each tensor over ``group``, in place, with few messages."""
    _packed(tensors, lambda flat: distributed.all_reduce(flat, group=group, sync_op=False))


def reduce_packed(tensors: Sequence[paddle.Tensor], group: Any, owner: int) -> None:
    """Sum each tensor over ``group`` into the member ``owner``. The tensors of other members become
    undefined."""
    destination = group.ranks[owner]
    _packed(tensors, lambda flat: distributed.reduce(flat, destination, group=group, sync_op=False))


def broadcast_packed(tensors: Sequence[paddle.Tensor], group: Any, owner: int) -> None:
    """Copy the tensors of the member ``owner`` to all members of ``group``."""
    source = group.ranks[owner]
    _packed(tensors, lambda flat: distributed.broadcast(flat, source, group=group, sync_op=False))


@paddle.no_grad()
def sum_gathered(tensor: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Sum a few numbers over ``group``, for types that some collective libraries cannot reduce.

    Each member gathers all numbers and adds them in rank order, so all members get bitwise equal sums.
    Ascend's library, for example, gathers every type but sums neither float64 nor uint8, and has no mean.
    """
    own = tensor.reshape([-1])
    received = paddle.empty([group.nranks * own.size], own.dtype)
    distributed.stream.all_gather(received, own, group=group)
    return paddle.add_n(list(received.reshape([group.nranks, *tensor.shape]).unbind(0)))


def equalize_packed(copies: Sequence[paddle.Tensor], group: Any) -> None:
    """Overwrite the replicas of every member with those of the first member, bitwise.

    All-reduces the tensors after multiplying those of the other members by zero. This is exact for any order
    of the sum, but spreads a non-finite number from any member to all.
    """
    is_first = group.rank == 0

    def start(flat: paddle.Tensor) -> Any:
        return distributed.all_reduce(flat if is_first else flat.scale_(0.0), group=group, sync_op=False)

    _packed(copies, start)


def _packed(tensors: Sequence[paddle.Tensor], start: Callable[[paddle.Tensor], Any]) -> None:
    """Run an operation on one bucket at a time, so that extra memory is needed for only one bucket."""
    for bucket in _buckets(tensors):
        Packed(bucket, start).complete()


class Packed:
    """A running operation on tensors packed into one message.

    Args:
        tensors: tensors of one type. They get the result in :meth:`complete` and must not be used before.
        start: a function that starts an in-place operation on a flat tensor and returns the task.
    """

    @paddle.no_grad()
    def __init__(self, tensors: Sequence[paddle.Tensor], start: Callable[[paddle.Tensor], Any]) -> None:
        self._tensors = list(tensors)
        flat = _whole(tensors[0]) if len(tensors) == 1 else paddle.concat([t.reshape([-1]) for t in tensors])
        self._flat, self._task = flat, start(flat)

    @paddle.no_grad()
    def complete(self) -> None:
        self._task.wait()
        end, flat = 0, self._flat
        for tensor in self._tensors if len(self._tensors) > 1 else ():
            begin, end = end, end + tensor.size
            part = flat._slice(begin, end)  # a view of the bucket, whatever FLAGS_use_stride_kernel is
            paddle.assign(part.reshape_(tensor.shape), tensor)
        self._tensors, self._flat, self._task = [], None, None


@paddle.no_grad()
def flatten_in_place(tensors: Sequence[paddle.Tensor]) -> paddle.Tensor:
    """Move ``tensors`` of one type into one flat tensor, and make them views of it. Returns the flat tensor.

    Each view starts at a multiple of :data:`ALIGNMENT`, with zeros in the gaps, and the old memory is freed.
    A single tensor is returned unchanged. The move itself needs twice the memory. ``tensors`` must not be
    views of other tensors.
    """
    if len(tensors) == 1:
        return _whole(tensors[0])
    begins, _ = aligned_offsets([tensor.size for tensor in tensors], tensors[0].element_size())
    parts, end = [], 0
    for tensor, begin in zip(tensors, begins, strict=True):
        if begin > end:
            parts.append(paddle.zeros([begin - end], tensor.dtype))
        parts.append(tensor.reshape([-1]))
        end = begin + tensor.size
    flat = paddle.concat(parts)
    for tensor, begin in zip(tensors, begins, strict=True):
        flat._slice(begin, begin + tensor.size)._share_buffer_to(_whole(tensor))
    return flat


def _whole(tensor: paddle.Tensor) -> paddle.Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _buckets(tensors: Sequence[paddle.Tensor]) -> Iterator[list[paddle.Tensor]]:
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket, size = [], 0
        for tensor in (t for t in tensors if t.dtype == dtype):
            nbytes = tensor.size * tensor.element_size()
            if bucket and size + nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += nbytes
        if bucket:
            yield bucket


def exchange(tensor: paddle.Tensor, group: Any, *, split_dim: int, concat_dim: int) -> paddle.Tensor:
    """Differentiable all-to-all that splits ``split_dim`` and gathers ``concat_dim``.

    ``[..., n x k, ..., m, ...]`` becomes ``[..., k, ..., n x m, ...]`` with n members in ``group``.
    """
    return _Exchange.apply(tensor, group, split_dim, concat_dim)


def sum_of_ranks(tensor: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Sum ``tensor`` over ``group``, if all ranks compute the same result from the sum. The gradient of each
    rank's summand is the gradient of the sum, not multiplied by the number of ranks."""
    return _SumOfRanks.apply(tensor, group)


def sum_gradient(tensor: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Return a copy of ``tensor`` whose gradient is summed over ``group``."""
    return _SumGradient.apply(tensor, group)


def all_gather_columns(tensor: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Gather ``[..., n]`` of all members of ``group`` along the last dimension. Not differentiable."""
    parts: list[paddle.Tensor] = []
    distributed.all_gather(parts, tensor, group=group)
    return paddle.concat(parts, axis=-1)


def alltoall_rows(
    rows: paddle.Tensor, sent: Sequence[int], received: Sequence[int], group: Any
) -> paddle.Tensor:
    """Exchange rows: send ``sent[i]`` rows to member i of ``group``, and receive ``received[i]`` rows from
    it. Not differentiable. Every member must call this, even without rows."""
    return start_alltoall_rows(rows, sent, received, group)[1]()


def start_alltoall_rows(
    rows: paddle.Tensor, sent: Sequence[int], received: Sequence[int], group: Any
) -> tuple[paddle.Tensor, Callable[[], paddle.Tensor]]:
    """Start :func:`alltoall_rows` asynchronously. Returns the tensor that will contain the rows, and a
    function that waits for the rows and returns the tensor."""
    sent, received = ([int(number) for number in numbers] for numbers in (sent, received))
    out = paddle.empty([sum(received), *rows.shape[1:]], rows.dtype)
    rows = _whole(rows)
    task = distributed.stream.alltoall_single(
        out, rows, out_split_sizes=received, in_split_sizes=sent, group=group, sync_op=False
    )

    def finish(_used: paddle.Tensor = rows) -> paddle.Tensor:
        task.wait()
        return out

    return out, finish


def gather_rows(rows: paddle.Tensor, stride: int, group: Any) -> paddle.Tensor:
    """Gather the rows of all members of ``group``. The rows of member i start at row ``i * stride`` of the
    result, followed by zeros. Not differentiable."""
    missing = stride - rows.shape[0]
    if missing:
        rows = paddle.concat([rows, paddle.zeros([missing, *rows.shape[1:]], rows.dtype)])
    gathered = paddle.empty([group.nranks * stride, *rows.shape[1:]], rows.dtype)
    distributed.stream.all_gather(gathered, _whole(rows), group=group)
    return gathered


class _SumOfRanks(PyLayer):
    @staticmethod
    def forward(ctx: Any, tensor: paddle.Tensor, group: Any) -> paddle.Tensor:
        total = tensor.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> paddle.Tensor:
        return upstream


class _SumGradient(PyLayer):
    @staticmethod
    def forward(ctx: Any, tensor: paddle.Tensor, group: Any) -> paddle.Tensor:
        ctx.group = group
        return tensor.clone()  # Paddle would treat returning the tensor itself as an in-place change

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> paddle.Tensor:
        distributed.stream.all_reduce(upstream, group=ctx.group, use_calc_stream=True)
        return upstream


class _Exchange(PyLayer):
    @staticmethod
    def forward(
        ctx: Any, tensor: paddle.Tensor, group: Any, split_dim: int, concat_dim: int
    ) -> paddle.Tensor:
        ctx.arguments = group, concat_dim, split_dim
        return _all_to_all(tensor, group, split_dim, concat_dim)

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> paddle.Tensor:
        return _all_to_all(upstream, *ctx.arguments)


def _all_to_all(tensor: paddle.Tensor, group: Any, split_dim: int, concat_dim: int) -> paddle.Tensor:
    parts = paddle.stack(tensor.split(group.nranks, axis=split_dim))
    received = paddle.empty_like(parts)
    distributed.alltoall_single(received, parts, group=group)
    return paddle.concat(list(received.unbind(0)), axis=concat_dim)
