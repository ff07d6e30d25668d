"""Token loss (cross entropy), in float32 for training and in float64 for evaluation; and scores of tokens:
the log probability of each token, and whether the token is the most likely one.

Shape letters: s positions, b rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import _C_ops
from paddle.autograd import PyLayer

from ppfleetx.distributed.collectives import sum_gathered
from ppfleetx.nn.chunked_loss import DeferredLogits
from ppfleetx.nn.cpu_ops import ops
from ppfleetx.nn.loss_output import LossOutput, Sum

# Number of rows of logits that are processed at a time. Temporary tensors are as large as these rows.
_BLOCK_ROWS = 128


def token_loss(
    logits: paddle.Tensor | DeferredLogits,
    labels: paddle.Tensor,
    loss_mask: paddle.Tensor,
    true_vocab: int,
    group: Any = None,
) -> LossOutput:
    """Return the sum of the cross entropy over the valid tokens of a micro batch.

    Args:
        logits: ``[s, b, columns]``, or :class:`~ppfleetx.nn.chunked_loss.DeferredLogits`. Columns from
            ``true_vocab`` on are padding and get no probability.
        labels: ``[b, s]`` int64, below ``true_vocab`` wherever the mask is not 0.
        loss_mask: ``[b, s]`` float32 weights, usually 0 or 1.
        group: the ranks that divide the columns of the logits equally, in order of rank. All of them get the
            same result. None: this rank has all columns.

    Returns:
        A :class:`LossOutput` with ``loss`` in float32 (float64 without gradients), and with ``rows``.
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
        return losses + _nan_if_not_finite(logits).astype("float64")
    columns = labels.unsqueeze(-1)
    if paddle.is_grad_enabled():
        return F.cross_entropy(logits, columns, reduction="none").squeeze(-1)
    softmax, losses = _C_ops.cross_entropy_with_softmax(logits, columns, False, True, True, -100, -1)
    exact = losses.squeeze(-1).astype("float64") + _nan_if_not_finite(logits).astype("float64")
    # Paddle's CPU kernel adds exponentials one by one in float32, so over 50,000 columns its loss is about
    # 1e-5 too low. A row of its softmax adds up to the true sum of exponentials divided by the kernel's sum,
    # so the logarithm of this row sum corrects the loss.
    return exact + _row_sums(softmax).log() if softmax.place.is_cpu_place() else exact


def _parallel_entropy(logits: paddle.Tensor, labels: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Return the cross entropy of each token. The columns of ``logits`` are divided over the ranks of
    ``group``. With gradients, the result is that of Paddle's kernel, in float32. Under ``no_grad``, it is
    float64, and NaN for a token with a logit that is not finite. On a CPU, the float64 result
    is also corrected for a rounding error of Paddle's kernel."""
    from paddle import distributed
    from paddle.distributed.fleet.layers.mpu.mp_ops import _c_softmax_with_cross_entropy

    losses, softmax = _c_softmax_with_cross_entropy(
        logits, labels.unsqueeze(-1), group=group, return_softmax=True
    )
    losses = losses.squeeze(-1)
    if paddle.is_grad_enabled():
        return losses
    nan_or_zero = _nan_if_not_finite(logits)
    on_cpu = softmax.place.is_cpu_place()
    parts = paddle.stack([nan_or_zero.astype("float64"), _row_sums(softmax)]) if on_cpu else nan_or_zero
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
    """Return the sums over the last axis of a float32 tensor in host memory, as float64. NumPy computes the
    sums, because its pairwise summation is more exact than adding one by one."""
    sums = np.add.reduce(np.from_dlpack(softmax.detach()), axis=-1)
    return paddle.to_tensor(sums.astype(np.float64))


def _nan_if_not_finite(logits: paddle.Tensor) -> paddle.Tensor:
    """Return ``[s, b]``: 0 for each position whose ``logits [s, b, columns]`` are all finite, NaN for the
    others."""
    # Paddle's cross entropy on the CPU turns NaN logits into a finite number.
    return logits.sum(axis=-1) * 0.0


class _HidePadding(PyLayer):
    """Autograd function that sets the padding columns of the logits to a very low value, so that they get no
    probability and no gradient."""

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


# -- scores of tokens


def token_scores(
    logits: paddle.Tensor | DeferredLogits,
    labels: paddle.Tensor,
    mask: paddle.Tensor,
    true_vocab: int,
    group: Any = None,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the log probability of each label, and whether the label is the most likely token.

    Args:
        logits: ``[s, b, columns]``, or :class:`~ppfleetx.nn.chunked_loss.DeferredLogits`. Columns from
            ``true_vocab`` on are padding and get no probability.
        labels: ``[b, s]`` int64, below ``true_vocab`` wherever the mask is not 0.
        mask: ``[b, s]``; only positions where the mask is not 0 are scored.
        group: the ranks that divide the columns of the logits equally, in order of rank. All of them get the
            same results. None: this rank has all columns.

    Returns:
        Log probabilities ``[b, s]`` float64, and ``[b, s]`` bool. Where the mask is 0, the results are 0 and
            True. If several logits are the highest, the first one counts as the most likely. Logits that are
            NaN or +inf give NaN.
    """
    if isinstance(logits, DeferredLogits):
        of_piece = partial(token_scores, true_vocab=true_vocab, group=group)
        log_probs, is_greedy = zip(*logits.each(labels, mask, of_piece), strict=True)
        return paddle.concat(list(log_probs), axis=1), paddle.concat(list(is_greedy), axis=1)
    positions, rows, width = logits.shape
    scored = paddle.nonzero(mask.transpose([1, 0]).flatten()).flatten()
    log_probs = paddle.zeros([positions * rows], dtype="float64")
    greedy = paddle.ones([positions * rows], dtype="int32")
    if scored.shape[0]:
        wanted = labels.transpose([1, 0]).flatten().index_select(scored)
        flat, parts = logits.reshape([-1, width]), []
        for start in range(0, scored.shape[0], _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            parts.append(_score_rows(flat.index_select(scored[block]), wanted[block], true_vocab, group))
        here, is_greedy = (paddle.concat(list(part)) for part in zip(*parts, strict=True))
        log_probs = log_probs.scatter(scored, here)
        greedy = greedy.scatter(scored, is_greedy.astype("int32"))
    shape = [positions, rows]
    return log_probs.reshape(shape).transpose([1, 0]), greedy.astype("bool").reshape(shape).transpose([1, 0])


def _score_rows(
    rows: paddle.Tensor, wanted: paddle.Tensor, true_vocab: int, group: Any
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the log probability (float64) of the token ``wanted`` in each row of logits, and whether this
    token is the most likely one.

    Args:
        rows: ``[rows, columns]``, logits.
        wanted: ``[rows]``, token ids.
    """
    width = rows.shape[-1]
    first = 0 if group is None else group.rank * width
    rows, num_true = rows.astype("float32"), max(0, true_vocab - first)
    if num_true < width:
        rows = rows.clone()
        rows[:, num_true:] = -float("inf")
    # Not Paddle's cross entropy, which on the CPU is capped at 64 and turns NaN logits into a finite number.
    highest, token = _likeliest(rows.max(axis=-1), rows.argmax(axis=-1) + first, group)
    column = wanted - first
    is_here = paddle.logical_and(column >= 0, column < width)
    own = rows.take_along_axis(column.clip(0, width - 1).unsqueeze(-1), axis=-1).squeeze(-1)
    own = paddle.where(is_here, own.astype("float64"), paddle.zeros([], dtype="float64"))
    # Sum in float64, because a float32 sum over 50,000 columns changes the logarithm by 1e-6.
    powers = (rows - highest.unsqueeze(-1)).exp().sum(axis=-1, dtype="float64")
    if group is not None:
        own, powers = sum_gathered(paddle.stack([own, powers]), group).unbind(0)
    return own - highest.astype("float64") - powers.log(), token == wanted


def _likeliest(
    highest: paddle.Tensor, token: paddle.Tensor, group: Any
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the highest logit and its token id for each row, over all ranks that divide the columns.

    Args:
        highest: ``[rows]``, the highest logit of each row on this rank.
        token: ``[rows]``, the token id of each highest logit.
    """
    from paddle import distributed

    if group is None:
        return highest, token
    gathered: list[paddle.Tensor] = []
    # Token ids and float32 values are exact in float64.
    mine = paddle.stack([highest.astype("float64"), token.astype("float64")])
    distributed.all_gather(gathered, mine, group=group)
    found = paddle.stack(gathered)
    owner = found[:, 0].argmax(axis=0, keepdim=True)
    tokens = found[:, 1].take_along_axis(owner, axis=0).squeeze(0)
    return found[:, 0].max(axis=0).astype("float32"), tokens.astype("int64")
