"""Attention masks. A boolean mask is True where attention is allowed.

The last query and the last key have the same position.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import paddle

# Lower than any real score, and far from the limits of float32 and bfloat16.
_BLOCKED = -1e9


def causal_mask(num_queries: int, num_keys: int) -> paddle.Tensor:
    """Return the causal mask ``[queries, keys]``: each position attends to itself and all earlier ones."""
    rows = paddle.arange(num_queries).unsqueeze(-1) + (num_keys - num_queries)
    return paddle.arange(num_keys).unsqueeze(0) <= rows


def attention_mask(num_queries: int, num_keys: int, document_start: paddle.Tensor | None) -> paddle.Tensor:
    """Return the causal mask, restricted to each query's document: True where a query may attend to a key,
    ``[batch, 1, queries, keys]``.

    Args:
        document_start: ``[batch, queries]``, the first position that each query may attend to, for packed
            documents and left-padded prompts. None: the mask is only causal, ``[1, 1, queries, keys]``.
    """
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
    """Return the first position that each of the last ``length`` positions may attend to, as
    ``[batch, length]``. It is the first one inside both the attention window and the document.

    Args:
        num_keys: total number of positions, including cached ones; None: ``length``.
    """
    past = 0 if num_keys is None else num_keys - length
    first = (paddle.arange(length, dtype="int32") + (past - window)).clip(min=0).unsqueeze(0)
    if document_start is None:
        return first.expand([batch, length])
    return paddle.maximum(first.astype(document_start.dtype), document_start)


def mask_scores(
    scores: paddle.Tensor, num_queries: int, num_keys: int, document_start: paddle.Tensor | None
) -> paddle.Tensor:
    """Mask ``scores [batch, heads, queries, keys]``, so that the softmax gives probability 0 to blocked
    keys."""
    # Adding a cached mask is cheaper than ``where`` and its gradient, but several times slower in an export.
    # With document_start, ``where`` keeps rows without any allowed key (left padding) finite.
    if paddle.in_dynamic_mode() and document_start is None:
        return scores + _causal_penalty(num_queries, num_keys, scores.dtype, paddle.get_device())
    mask = attention_mask(num_queries, num_keys, document_start)
    return paddle.where(mask, scores, paddle.full([], blocked_score(scores.dtype), dtype=scores.dtype))


def blocked_score(dtype: paddle.dtype) -> float:
    """Return the score of a masked position. It is finite, so that a fully masked row gives no NaN."""
    return max(_BLOCKED, paddle.finfo(dtype).min)


def penalty_of(visible: paddle.Tensor, dtype: paddle.dtype = paddle.float32) -> paddle.Tensor:
    """Return a mask to add to scores: 0 where ``visible`` is True, else :func:`blocked_score`."""
    zero, blocked = (paddle.full([], value, dtype) for value in (0.0, blocked_score(dtype)))
    return paddle.where(visible, zero, blocked)


def cached_mask(
    num_queries: int, num_keys: int, visible: np.ndarray, window: int | None = None
) -> np.ndarray:
    """Return the mask ``[batch, 1, queries, keys]`` of the keys that each query may attend to, for queries
    that follow cached keys.

    Args:
        num_keys: number of allocated columns of the cache. Columns beyond those of ``visible`` are unused.
        visible: ``[batch, cached keys + queries]`` bool, whether a column belongs to its row's sequence.
        window: number of earlier visible columns that each query may attend to; None: all.
    """
    allowed = np.zeros((len(visible), num_queries, num_keys), dtype=bool)
    allowed[:, :, : visible.shape[1]] = visible[:, None]
    past = visible.shape[1] - num_queries
    allowed &= np.arange(num_keys) <= past + np.arange(num_queries)[:, None]
    if window is not None:  # count only the row's visible columns
        position = visible.cumsum(axis=1)
        near = position[:, None] >= position[:, past:, None] - window
        allowed[:, :, : visible.shape[1]] &= near
    return allowed[:, None]


def flash_row_limits(document_start: paddle.Tensor) -> paddle.Tensor:
    """Convert ``document_start [b, s]`` to flashmask's ``startend_row_indices [b, 1, s, 1]`` for causal
    attention. The starts must not decrease along a row."""
    num_keys = document_start.shape[1]
    keys = paddle.arange(num_keys, dtype=document_start.dtype).expand([document_start.shape[0], num_keys])
    # Key k is hidden from the first query whose document starts after k, and from all later queries. Starts
    # do not decrease along a row, so the index of that query is the number of starts that are at most k.
    limits = paddle.searchsorted(document_start, keys, right=True, out_int32=True)
    return limits.unsqueeze([1, 3])


@lru_cache(maxsize=8)
def _causal_penalty(num_queries: int, num_keys: int, dtype: paddle.dtype, device: str) -> paddle.Tensor:
    """Return the causal mask as a cached matrix ``[queries, keys]`` to add to scores."""
    return penalty_of(causal_mask(num_queries, num_keys), dtype)
