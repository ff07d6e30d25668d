"""Collectives on packed tensors and on rows of tensors, and differentiable collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import paddle
from paddle import distributed
from paddle.autograd import PyLayer

BUCKET_BYTES = 64 << 20
"""Maximum size of a bucket, that is, of the tensors that are packed into one message. A larger tensor has a
bucket of its own. Larger buckets need fewer messages, and smaller buckets need less extra memory."""

ALIGNMENT = 256
"""Alignment in bytes of each tensor within a flat tensor. Separately allocated tensors have the same
alignment, and multi-tensor kernels use vector loads without checking it."""


def aligned_offsets(sizes: Iterable[int], itemsize: int) -> tuple[list[int], int]:
    """Return the offset of each tensor in one flat tensor, and the end of the last tensor, both in elements.
    Each tensor begins at a multiple of :data:`ALIGNMENT` bytes. ``sizes`` are the tensors' numbers of
    elements, and ``itemsize`` is the number of bytes per element.

    >>> aligned_offsets([3, 64, 65, 1], 4)
    ([0, 64, 128, 256], 257)
    """
    step, begins, end = ALIGNMENT // itemsize, [], 0
    for size in sizes:
        begins.append(-(-end // step) * step)
        end = begins[-1] + size
    return begins, end


def all_reduce_packed(tensors: Sequence[paddle.Tensor], group: Any) -> None:
    """Sum each tensor over the ranks of ``group``, in place. Tensors are packed into a few large messages."""
    _packed(tensors, lambda flat: distributed.all_reduce(flat, group=group, sync_op=False))


def reduce_packed(tensors: Sequence[paddle.Tensor], group: Any, owner: int) -> None:
    """Sum each tensor over the ranks of ``group``, in place on rank ``owner`` of the group. On the other
    ranks, the contents become undefined."""
    destination = group.ranks[owner]
    _packed(tensors, lambda flat: distributed.reduce(flat, destination, group=group, sync_op=False))


@paddle.no_grad()
def sum_gathered(tensor: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Sum a small tensor elementwise over ``group``. The sums are bitwise equal on all ranks."""
    # All ranks add in rank order. This is not an all-reduce, because Ascend's library cannot sum float64 or
    # uint8.
    own = tensor.reshape([-1])
    received = paddle.empty([group.nranks * own.size], own.dtype)
    distributed.stream.all_gather(received, own, group=group)
    return paddle.add_n(list(received.reshape([group.nranks, *tensor.shape]).unbind(0)))


def equalize_packed(copies: Sequence[paddle.Tensor], group: Any) -> None:
    """Copy the first rank's tensors to all other ranks of ``group``, in place. An element that is non-finite
    on any rank becomes non-finite on all ranks, so that an error on one rank is not hidden."""
    # The other ranks add zeros in an all-reduce, so the result is exact. NaN or infinity times 0 is NaN.
    is_first = group.rank == 0

    def start(flat: paddle.Tensor) -> Any:
        return distributed.all_reduce(flat if is_first else flat.scale_(0.0), group=group, sync_op=False)

    _packed(copies, start)


def _packed(tensors: Sequence[paddle.Tensor], start: Callable[[paddle.Tensor], Any]) -> None:
    """Pack ``tensors`` into buckets, and run a collective on one bucket after another. So no more than one
    bucket needs extra memory at a time."""
    for bucket in _buckets(tensors):
        Packed(bucket, start).complete()


class Packed:
    """A collective in progress on ``tensors`` of one element type, packed into one flat tensor. ``start``
    must start an asynchronous in-place collective on the flat tensor and return the task of the collective.
    Do not use the tensors before :meth:`complete` has returned."""

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
    """Move ``tensors`` into one flat tensor, and return it. Afterwards, each tensor is a view of its part of
    the flat tensor. A single tensor is returned in its own shape.

    Each part starts at a multiple of :data:`ALIGNMENT` bytes (:func:`aligned_offsets`); zeros fill the gaps.
    The tensors must have the same element type and must not share memory with other tensors. During the move,
    both the old and the new memory are in use.
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
    """Differentiable all-to-all over ``group``: split the tensor along ``split_dim``, and concatenate the
    received parts along ``concat_dim``. With n ranks, ``split_dim`` becomes n times smaller, and
    ``concat_dim`` n times larger."""
    return _Exchange.apply(tensor, group, split_dim, concat_dim)


def sum_of_ranks(tensor: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Return the sum of ``tensor`` over ``group``. The backward pass returns the gradient of the sum
    unchanged, which is correct if all ranks compute the same loss from the sum."""
    return _SumOfRanks.apply(tensor, group)


def sum_gradient(tensor: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Return a copy of ``tensor`` whose gradient is summed over ``group`` in the backward pass."""
    return _SumGradient.apply(tensor, group)


def all_gather_columns(tensor: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Concatenate the ``tensor`` of all ranks of ``group`` along the last dimension. Not differentiable."""
    parts: list[paddle.Tensor] = []
    distributed.all_gather(parts, tensor, group=group)
    return paddle.concat(parts, axis=-1)


def alltoall_rows(
    rows: paddle.Tensor, sent: Sequence[int], received: Sequence[int], group: Any
) -> paddle.Tensor:
    """Exchange rows among the ranks of ``group``. The first ``sent[0]`` rows of ``rows`` go to rank 0, the
    next ``sent[1]`` rows to rank 1, and so on. The result has ``received[i]`` rows from each rank i, in rank
    order. Every rank must call this. Not differentiable."""
    return start_alltoall_rows(rows, sent, received, group)[1]()


def start_alltoall_rows(
    rows: paddle.Tensor, sent: Sequence[int], received: Sequence[int], group: Any
) -> tuple[paddle.Tensor, Callable[[], paddle.Tensor]]:
    """Start an all-to-all of rows over ``group`` without waiting, with the arguments of
    :func:`alltoall_rows`. Returns the tensor that will contain the received rows, and a function that waits
    for the rows and returns that tensor."""
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
    """Gather the rows of all ranks of ``group`` into one tensor, in rank order. Each rank's rows are padded
    with zeros to ``stride`` rows. Not differentiable."""
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
        # An all-reduce of the gradient would count the loss once per rank.
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
