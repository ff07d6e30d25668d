"""Who may attend to whom: the only place that decides it, in training, evaluation and decoding alike.

Shapes: b batch, n heads, q query positions, k key positions. Keys end where queries end: with a cache
the first ``k - q`` keys are the past, and query row ``i`` stands at position ``i + k - q``.
Masks are boolean, True where attention is allowed.
"""

from __future__ import annotations

from functools import lru_cache

import paddle

# Below any real score and far from float32's and bfloat16's limits; float16 scores are masked in float32.
_BLOCKED = -1e9


def causal_mask(num_queries: int, num_keys: int) -> paddle.Tensor:
    """``[q, k]``: a position sees itself and what is before it."""
    rows = paddle.arange(num_queries).unsqueeze(-1) + (num_keys - num_queries)
    return paddle.arange(num_keys).unsqueeze(0) <= rows


def attention_mask(num_queries: int, num_keys: int, document_start: paddle.Tensor | None) -> paddle.Tensor:
    """Mask to broadcast against scores ``[b, n, q, k]``.

    Args:
        num_queries: query positions of this call.
        num_keys: key positions, past ones included.
        document_start: ``[b, q]`` first absolute position each query may attend to (documents packed
            into one row; left padding of prompts), or None for no such limit.

    Returns:
        ``[1, 1, q, k]``, or ``[b, 1, q, k]`` with ``document_start``.
    """
    causal = _causal(num_queries, num_keys).unsqueeze([0, 1])
    if document_start is None:
        return causal
    keys = paddle.arange(num_keys, dtype=document_start.dtype).reshape([1, 1, 1, -1])
    return paddle.logical_and(causal, keys >= document_start.unsqueeze([1, 3]))


def block(scores: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
    """Scores with what is not allowed set so low that its probability is exactly zero.

    ``where`` and not a sum: a row without any allowed key (left padding) stays finite and equal, and
    inference programs run an additive mask several times slower.
    """
    return paddle.where(mask, scores, paddle.full([], _BLOCKED, dtype=scores.dtype))


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


def _causal(num_queries: int, num_keys: int) -> paddle.Tensor:
    if paddle.in_dynamic_mode():
        return _cached_causal(num_queries, num_keys, paddle.get_device())
    return causal_mask(num_queries, num_keys)


@lru_cache(maxsize=8)
def _cached_causal(num_queries: int, num_keys: int, device: str) -> paddle.Tensor:
    """Every layer of every step asks for the same one."""
    return causal_mask(num_queries, num_keys)
