"""Operators of Paddle whose CPU kernels only throw, on CPU process groups.

Each function gets the original operator and returns what takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle.autograd import PyLayer


def _process_group(ring_id: int) -> Any:
    return paddle.distributed.get_group(ring_id).process_group


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
