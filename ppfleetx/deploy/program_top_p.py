"""Top-p in an exported program: where to stop, without sorting a vocabulary.

Paddle's sort of 50000 probabilities takes longer than a small model does. Here their mass is first summed in
buckets; p is reached in one of them, and only the few tokens of that one are put in order.
"""

from __future__ import annotations

import paddle

from ppfleetx.generation.processors import last_kept, nucleus

_BUCKETS = 1 << 13
_FEW = 512


def nucleus_by_buckets(probabilities: paddle.Tensor, top_p: paddle.Tensor) -> paddle.Tensor:
    """:func:`~ppfleetx.generation.processors.nucleus` of ``probabilities [b, V]`` and ``top_p [1]``."""
    # The fourth root spreads what models give, from 1 down to 1e-10, over the buckets.
    bucket = (probabilities.sqrt().sqrt() * (_BUCKETS - 1)).astype("int64")
    up_to = _bucket_mass(probabilities, bucket).cumsum(-1)
    above = up_to[:, -1:] - up_to
    # Where all that there is does not sum to p, which only rounding brings about, the smallest is the last.
    boundary = (above >= top_p).astype("int64").sum(-1, keepdim=True)
    boundary = paddle.maximum(boundary, bucket.min(-1, keepdim=True))
    zero = paddle.zeros([], dtype=probabilities.dtype)
    inside = paddle.where(bucket == boundary, probabilities, zero)
    falling, _ = paddle.topk(inside, min(_FEW, probabilities.shape[-1]), axis=-1)
    _, count = last_kept(falling, top_p - paddle.take_along_axis(above, boundary, axis=1))
    size = (falling > 0).astype("int64").sum(-1, keepdim=True)
    count = paddle.maximum(paddle.minimum(count, size), paddle.ones_like(count))
    smallest = paddle.take_along_axis(falling, count - 1, axis=1)
    is_cut = (falling[:, -1:] > 0).any()  # there may be more in the bucket than were put in order
    has_equals = ((falling == smallest).astype("int64").sum(-1) > 1).any()
    if paddle.logical_or(is_cut, has_equals):
        kept = nucleus(probabilities, top_p)
    else:
        kept = paddle.where(probabilities >= smallest, probabilities, zero)
    return kept


def _bucket_mass(probabilities: paddle.Tensor, bucket: paddle.Tensor) -> paddle.Tensor:
    """``[b, buckets]``: sum of the probabilities in each."""
    rows = paddle.arange(probabilities.shape[0]).unsqueeze(-1)
    place = (bucket + rows * _BUCKETS).flatten()
    # One more without mass in the last place, so that there are as many places as there shall be.
    last = rows.max().reshape([1]) * _BUCKETS + (_BUCKETS - 1)
    weights = paddle.concat([probabilities.flatten(), paddle.zeros([1], dtype=probabilities.dtype)])
    mass = paddle.bincount(paddle.concat([place, last]), weights=weights)
    return mass.reshape([-1, _BUCKETS])
