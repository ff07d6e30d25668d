"""Token loss (cross entropy), in float32 for training and in float64 for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import _C_ops
from paddle.autograd import PyLayer

from ppfleetx.nn.chunked_loss import DeferredLogits
from ppfleetx.nn.cpu_ops import ops
from ppfleetx.nn.loss_output import LossOutput, Sum


def token_loss(
    logits: paddle.Tensor | DeferredLogits,
    labels: paddle.Tensor,
    loss_mask: paddle.Tensor,
    true_vocab: int,
    group: Any = None,
) -> LossOutput:
    """Return the sum of the cross entropy over the valid tokens of a micro batch.

    Args:
        logits: ``[s, b, columns]``, or an object that yields them in chunks. Columns from ``true_vocab`` on
            are padding and get no probability.
        labels: ``[b, s]`` int64, below ``true_vocab`` wherever the mask is not 0.
        loss_mask: ``[b, s]`` float32 weights, usually 0 or 1.
        group: the ranks that divide the columns of the logits equally, in order of rank. All of them get the
            same result. None: this rank has all columns.

    Returns:
        The loss, a scalar in float32 (float64 without gradients), and a function that returns the losses of
            the rows.
    """
    if isinstance(logits, DeferredLogits):
        of_piece = partial(token_loss, true_vocab=true_vocab, group=group)
        return _in_chunks(logits, labels, loss_mask, of_piece)
    width = logits.shape[-1]
    logits = logits.astype("float32")
    true_here = true_vocab if group is None else max(true_vocab - group.rank * width, 0)
    if true_here < width:
        logits = _HidePadding.apply(logits, true_here)
    labels = labels.transpose([1, 0])
    losses = cross_entropy(logits, labels) if group is None else _parallel_entropy(logits, labels, group)
    return _weighted_sum(losses, loss_mask)


def cross_entropy(logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
    """Return the cross entropy ``[...]`` of each token, from ``logits [..., columns]`` float32 and
    ``labels [...]`` int64. Without gradients, the result is float64, and NaN if a logit is not finite."""
    if logits.place.is_cpu_place() and logits.dtype == paddle.float32 and ops.are_available():
        losses = ops.cross_entropy(logits, labels.astype("int64"))
        if paddle.is_grad_enabled():
            return losses.astype("float32")
        return losses + _nothing_if_finite(logits).astype("float64")
    columns = labels.unsqueeze(-1)
    if paddle.is_grad_enabled():
        return F.cross_entropy(logits, columns, reduction="none").squeeze(-1)
    softmax, losses = _C_ops.cross_entropy_with_softmax(logits, columns, False, True, True, -100, -1)
    exact = losses.squeeze(-1).astype("float64") + _nothing_if_finite(logits).astype("float64")
    # Paddle's CPU kernel adds exponentials one by one in float32; over 50,000 columns its loss is about 1e-5
    # too low. The sum of a row of its softmax is the true sum of exponentials divided by the kernel's sum, so
    # the logarithm of the row's sum corrects the loss.
    return exact + _row_sums(softmax).log() if softmax.place.is_cpu_place() else exact


def _parallel_entropy(logits: paddle.Tensor, labels: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Return the cross entropy of each token, from logits whose columns are divided over the ranks of
    ``group``. Without gradients, the result is float64, and NaN if a logit is not finite."""
    from paddle import distributed
    from paddle.distributed.fleet.layers.mpu.mp_ops import _c_softmax_with_cross_entropy

    losses, softmax = _c_softmax_with_cross_entropy(
        logits, labels.unsqueeze(-1), group=group, return_softmax=True
    )
    losses = losses.squeeze(-1)
    if paddle.is_grad_enabled():
        return losses
    nothing = _nothing_if_finite(logits)
    on_cpu = softmax.place.is_cpu_place()
    parts = paddle.stack([nothing.astype("float64"), _row_sums(softmax)]) if on_cpu else nothing
    distributed.all_reduce(parts, group=group)  # includes non-finite logits on other ranks
    exact = parts[0] + parts[1].log() if on_cpu else parts.astype("float64")
    return losses.astype("float64") + exact


def _in_chunks(
    logits: DeferredLogits,
    labels: paddle.Tensor,
    loss_mask: paddle.Tensor,
    of_piece: Callable[..., LossOutput],
) -> LossOutput:
    rows: list[Callable[[], Sum]] = []

    def loss_of_piece(*piece: paddle.Tensor) -> paddle.Tensor:
        found = of_piece(*piece)
        rows.append(found.rows)
        return found.loss

    def joined() -> Sum:
        parts = [of_rows() for of_rows in rows]
        return Sum(paddle.add_n([part.value for part in parts]), paddle.add_n([part.count for part in parts]))

    return LossOutput(logits.loss(labels, loss_mask, loss_of_piece), rows=joined)


def _weighted_sum(per_token: paddle.Tensor, loss_mask: paddle.Tensor) -> LossOutput:
    weights = loss_mask.astype("float32").transpose([1, 0])
    weighted = per_token * weights.astype(per_token.dtype)
    kept = weighted.detach()
    return LossOutput(weighted.sum(), rows=lambda: Sum(kept.sum(axis=0), weights.sum(axis=0)))


def _row_sums(softmax: paddle.Tensor) -> paddle.Tensor:
    """Return the float64 sums over the last axis of a float32 tensor in host memory, added pairwise."""
    sums = np.add.reduce(np.from_dlpack(softmax.detach()), axis=-1)
    return paddle.to_tensor(sums.astype(np.float64))


def _nothing_if_finite(logits: paddle.Tensor) -> paddle.Tensor:
    """Return ``[s, b]``: 0 where all logits of a position in ``logits [s, b, columns]`` are finite, else
    NaN."""
    # Paddle's cross entropy on the CPU turns NaN logits into a finite number.
    return logits.sum(axis=-1) * 0.0


class _HidePadding(PyLayer):
    """Autograd function that lowers the padding columns of the logits, so that they get no probability and no
    gradient."""

    @staticmethod
    def forward(ctx: Any, logits: paddle.Tensor, true_vocab: int) -> paddle.Tensor:
        ctx.true_vocab = true_vocab
        hidden = logits.clone()  # ``where`` over all columns takes three times as long
        hidden[..., true_vocab:] = -1e9
        return hidden

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> paddle.Tensor:
        # The CPU softmax gives the lowest logit exp(-64), not 0.
        upstream[..., ctx.true_vocab :] = 0.0
        return upstream
