"""Operators of Paddle whose CPU kernels only throw, on CPU process groups.

Each function gets the original operator and returns what takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle.autograd import PyLayer

from ppfleetx.distributed.cpu import job as cpu_job


def _process_group(ring_id: int) -> Any:
    return paddle.distributed.get_group(ring_id).process_group


def _gather_last(tensor: paddle.Tensor, ring_id: int, nranks: int) -> paddle.Tensor:
    parts = [paddle.empty_like(tensor) for _ in range(nranks)]
    _process_group(ring_id).all_gather(parts, tensor, True)
    return paddle.concat(parts, axis=-1)


def _slice_last(tensor: paddle.Tensor, rank: int, nranks: int) -> paddle.Tensor:
    return paddle.split(tensor, nranks, axis=-1)[rank].clone()


class _Identity(PyLayer):
    """Forward a copy, backward the sum of the gradients over the group."""

    @staticmethod
    def forward(ctx: Any, tensor: paddle.Tensor, ring_id: int) -> paddle.Tensor:
        ctx.ring_id = ring_id
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        total = grad.clone()
        _process_group(ctx.ring_id).all_reduce(total)
        return total


class _Concat(PyLayer):
    """Forward the members' tensors side by side along the last dimension, backward one's own slice."""

    @staticmethod
    def forward(ctx: Any, tensor: paddle.Tensor, rank: int, nranks: int, ring_id: int) -> paddle.Tensor:
        ctx.rank, ctx.nranks = rank, nranks
        return _gather_last(tensor, ring_id, nranks)

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        return _slice_last(grad, ctx.rank, ctx.nranks)


class _Split(PyLayer):
    """Forward one's own slice of the last dimension, backward the members' gradients side by side."""

    @staticmethod
    def forward(ctx: Any, tensor: paddle.Tensor, rank: int, nranks: int, ring_id: int) -> paddle.Tensor:
        ctx.nranks, ctx.ring_id = nranks, ring_id
        return _slice_last(tensor, rank, nranks)

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        return _gather_last(grad, ctx.ring_id, ctx.nranks)


class _SoftmaxCrossEntropy(PyLayer):
    """Cross-entropy of logits whose classes are split over the group in rank order.

    Computed in float32 at least; ``loss`` is ``[..., 1]``, zero at ``ignore_index``.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: paddle.Tensor, label: paddle.Tensor, ignore_index: int, ring_id: int, rank: int
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        group = _process_group(ring_id)
        wide = logits if logits.dtype == paddle.float64 else logits.astype("float32")
        local = label.astype("int64") - rank * logits.shape[-1]
        peak = wide.max(axis=-1, keepdim=True)
        group.all_reduce(peak, 1)
        shifted = wide - peak
        exponent = shifted.exp()
        here = ((local >= 0) & (local < logits.shape[-1])).astype(wide.dtype)
        index = local.clip(0, logits.shape[-1] - 1)
        target = paddle.take_along_axis(shifted, index, axis=-1) * here
        sums = paddle.stack([exponent.sum(axis=-1, keepdim=True), target])
        group.all_reduce(sums)
        counted = (label != ignore_index).astype(wide.dtype)
        loss = (sums[0].log() - sums[1]) * counted
        softmax = exponent / sums[0]
        ctx.save_for_backward(softmax, index, here * counted, counted)
        ctx.dtype = logits.dtype
        softmax_out = softmax.astype(logits.dtype)
        ctx.mark_non_differentiable(softmax_out)
        return softmax_out, loss.astype(logits.dtype)

    @staticmethod
    def backward(ctx: Any, _: paddle.Tensor, grad: paddle.Tensor) -> paddle.Tensor:
        softmax, index, chosen, counted = ctx.saved_tensor()
        grad = grad.astype(softmax.dtype)
        out = softmax * (grad * counted)
        out = paddle.put_along_axis(out, index, -grad * chosen, axis=-1, reduce="add")
        return out.astype(ctx.dtype)


def make_c_identity(_: Any) -> Callable[..., paddle.Tensor]:
    def c_identity(tensor: paddle.Tensor, ring_id: int = 0, *_: Any) -> paddle.Tensor:
        return _Identity.apply(tensor, ring_id)

    return c_identity


def make_c_concat(_: Any) -> Callable[..., paddle.Tensor]:
    def c_concat(tensor: paddle.Tensor, rank: int, nranks: int, ring_id: int, *_: Any) -> paddle.Tensor:
        return _Concat.apply(tensor, rank, nranks, ring_id)

    return c_concat


def make_c_split(_: Any) -> Callable[..., paddle.Tensor]:
    def c_split(tensor: paddle.Tensor, rank: int, nranks: int, ring_id: int, *_: Any) -> paddle.Tensor:
        return _Split.apply(tensor, rank, nranks, ring_id)

    return c_split


def make_c_softmax_with_cross_entropy(_: Any) -> Callable[..., tuple[paddle.Tensor, paddle.Tensor]]:
    def c_softmax_with_cross_entropy(
        logits: paddle.Tensor, label: paddle.Tensor, ignore_index: int, ring_id: int, rank: int, nranks: int
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        return _SoftmaxCrossEntropy.apply(logits, label, ignore_index, ring_id, rank)

    return c_softmax_with_cross_entropy


def make_c_embedding(original: Callable[..., paddle.Tensor]) -> Callable[..., paddle.Tensor]:
    def c_embedding(
        table: paddle.Tensor, index: paddle.Tensor, start: int = 0, vocab_size: int = -1
    ) -> paddle.Tensor:
        if table.dtype in (paddle.float16, paddle.bfloat16):
            return original(table.astype("float32"), index, start, vocab_size).astype(table.dtype)
        return original(table, index, start, vocab_size)

    return c_embedding


def make_all_reduce_inplace(_: Any) -> Callable[..., paddle.Tensor]:
    def all_reduce_(tensor: paddle.Tensor, ring_id: int = 0, op: int = 0) -> paddle.Tensor:
        _process_group(ring_id).all_reduce(tensor, op)
        return tensor

    return all_reduce_


def make_wait_all(_: Any) -> Callable[..., Any]:
    def synchronize(tensor: Any, *_: Any) -> Any:
        cpu_job.wait_all()
        return tensor

    return synchronize
