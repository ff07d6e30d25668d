"""Attention masks, which decide which positions see each other in training, evaluation and decoding.

Shapes: b batch, n heads, q query positions, k key positions. Keys end where queries end: with a cache the
first ``k - q`` keys are the past, and query row ``i`` has position ``i + k - q``. Masks are boolean, True
where attention is allowed.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import paddle

# Below any real score and far from float32's and bfloat16's limits.
_BLOCKED = -1e9


def causal_mask(num_queries: int, num_keys: int) -> paddle.Tensor:
    """The causal mask ``[q, k]``: each position sees itself and everything before it."""
    rows = paddle.arange(num_queries).unsqueeze(-1) + (num_keys - num_queries)
    return paddle.arange(num_keys).unsqueeze(0) <= rows


def attention_mask(num_queries: int, num_keys: int, document_start: paddle.Tensor | None) -> paddle.Tensor:
    """The mask of allowed pairs, ``[1, 1, q, k]``, which broadcasts against scores ``[b, n, q, k]``. With
    ``document_start [b, q]``, the first absolute position that each query may attend to (documents packed
    into one row; left padding of prompts), it is ``[b, 1, q, k]``."""
    causal = causal_mask(num_queries, num_keys).unsqueeze([0, 1])
    if document_start is None:
        return causal
    keys = paddle.arange(num_keys, dtype=document_start.dtype).reshape([1, 1, 1, -1])
    return paddle.logical_and(causal, keys >= document_start.unsqueeze([1, 3]))


def window_start(
    window: int,
    batch: int,
    length: int,
    document_start: paddle.Tensor | None,
    num_keys: int | None = None,
) -> paddle.Tensor:
    """The first position that each of the last ``length`` of ``num_keys`` positions may attend to, ``[b, s]``
    int32: at most ``window`` before itself, and not before ``document_start [b, s]``."""
    past = 0 if num_keys is None else num_keys - length
    first = (paddle.arange(length, dtype="int32") + (past - window)).clip(min=0).unsqueeze(0)
    if document_start is None:
        return first.expand([batch, length])
    return paddle.maximum(first.astype(document_start.dtype), document_start)


def mask_scores(
    scores: paddle.Tensor, num_queries: int, num_keys: int, document_start: paddle.Tensor | None
) -> paddle.Tensor:
    """Set masked scores ``[b, n, q, k]`` so low that they get no probability.

    In dynamic mode the plain causal mask is added as a cached ``[q, k]`` matrix, which is cheaper than
    ``where`` and its gradient. Exported programs use ``where``, because in them a sum of different shapes is
    several times slower. With ``document_start``, rows may have no allowed key (left padding); here too,
    ``where`` is used, because it keeps them finite.
    """
    if paddle.in_dynamic_mode() and document_start is None:
        return scores + _causal_penalty(num_queries, num_keys, scores.dtype, paddle.get_device())
    mask = attention_mask(num_queries, num_keys, document_start)
    return paddle.where(mask, scores, paddle.full([], blocked_score(scores.dtype), dtype=scores.dtype))


def blocked_score(dtype: paddle.dtype) -> float:
    """The value of a masked score. It is finite, in float16 too, so that a fully masked row still has a
    softmax."""
    return max(_BLOCKED, paddle.finfo(dtype).min)


def penalty_of(visible: paddle.Tensor, dtype: paddle.dtype = paddle.float32) -> paddle.Tensor:
    """The addend for scores that leaves probability only where ``visible`` (bool, any shape) is True."""
    zero, blocked = (paddle.full([], value, dtype) for value in (0.0, blocked_score(dtype)))
    return paddle.where(visible, zero, blocked)


def cached_mask(
    num_queries: int, num_keys: int, visible: np.ndarray, window: int | None = None
) -> np.ndarray:
    """:func:`attention_mask` for queries that follow cached keys, ``[b, 1, q, k]``.

    Args:
        num_keys: the number of columns in the cache. Columns after the queries' own are still empty.
        visible: ``[b, past + q]`` bool, the columns that a row may attend to, apart from causality.
        window: how many visible columns before its own each query may attend to; None: all.
    """
    allowed = np.zeros((len(visible), num_queries, num_keys), dtype=bool)
    allowed[:, :, : visible.shape[1]] = visible[:, None]
    past = visible.shape[1] - num_queries
    allowed &= np.arange(num_keys) <= past + np.arange(num_queries)[:, None]
    if window is not None:  # count only columns that the row sees; the others are not part of it
        position = visible.cumsum(axis=1)
        near = position[:, None] >= position[:, past:, None] - window
        allowed[:, :, : visible.shape[1]] &= near
    return allowed[:, None]


def flash_row_limits(document_start: paddle.Tensor) -> paddle.Tensor:
    """``document_start [b, s]`` as flashmask's ``startend_row_indices [b, 1, s, 1]`` for causal attention.

    Key ``k`` is hidden from the first query whose document starts after ``k``, and from all later ones.
    ``document_start`` does not decrease along a row, so that query's index is the number of queries whose
    start is at most ``k``.
    """
    num_keys = document_start.shape[1]
    keys = paddle.arange(num_keys, dtype=document_start.dtype).expand([document_start.shape[0], num_keys])
    limits = paddle.searchsorted(document_start, keys, right=True, out_int32=True)
    return limits.unsqueeze([1, 3])


@lru_cache(maxsize=8)
def _causal_penalty(num_queries: int, num_keys: int, dtype: paddle.dtype, device: str) -> paddle.Tensor:
    """The addend ``[q, k]`` of the causal mask, 0 where attention is allowed. Cached, because every layer
    asks for it."""
    return penalty_of(causal_mask(num_queries, num_keys), dtype)
