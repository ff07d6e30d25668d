"""Score the tokens of a text: the log probability of each token, and whether it is the most likely one.

Shape letters: s positions, b rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import paddle

from ppfleetx.distributed.collectives import sum_gathered
from ppfleetx.nn.chunked_loss import DeferredLogits

# Number of rows of logits that are processed at a time. Temporary tensors are as large as these rows.
_BLOCK_ROWS = 128


def token_scores(
    logits: paddle.Tensor | DeferredLogits,
    labels: paddle.Tensor,
    mask: paddle.Tensor,
    true_vocab: int,
    group: Any = None,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the log probability of each label, and whether the label is the most likely token.

    Args:
        logits: ``[s, b, columns]``. Columns from ``true_vocab`` on are padding and get no probability.
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
    """Return the log probability (float64) of one token per row of logits, and whether this token is the
    most likely one.

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
        highest: ``[rows]``, the highest logits of this rank.
        token: ``[rows]``, their token ids.
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
