"""Top-p in an exported program: where to stop, without sorting a vocabulary.

Paddle's sort of 50000 probabilities takes longer than a small model does. Here their mass is first summed in
buckets; p is reached in one of them, and only the few tokens of that one are put in order.
"""

from __future__ import annotations

import paddle

from ppfleetx.generation.processors import last_kept

_BUCKETS = 1 << 16
_FEW = 128


def last_kept_of_all(
    probabilities: paddle.Tensor, top_p: paddle.Tensor
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """:func:`~ppfleetx.generation.processors.last_kept` of probabilities ``[b, V]`` in any order."""
    # The fourth root spreads what models give, from 1 down to 1e-10, over the buckets.
    bucket = (probabilities.sqrt().sqrt() * (_BUCKETS - 1)).astype("int64")
    up_to = _bucket_mass(probabilities, bucket).cumsum(-1)
    above = up_to[:, -1:] - up_to
    # Where all that there is does not sum to p, which only rounding brings about, the smallest is the last.
    boundary = (above >= top_p).astype("int64").sum(-1, keepdim=True)
    boundary = paddle.maximum(boundary, bucket.min(-1, keepdim=True))
    in_it = bucket == boundary
    size = in_it.astype("int64").sum(-1, keepdim=True)
    few = min(_FEW, probabilities.shape[-1])
    if (size > few).any():  # nearly equal probabilities
        smallest, count = last_kept(paddle.sort(probabilities, axis=-1, descending=True), top_p)
    else:
        inside = paddle.where(in_it, probabilities, paddle.zeros([], dtype=probabilities.dtype))
        falling, _ = paddle.topk(inside, few, axis=-1)
        _, reached = last_kept(falling, top_p - paddle.take_along_axis(above, boundary, axis=1))
        kept = paddle.minimum(reached, size)
        smallest = paddle.take_along_axis(falling, kept - 1, axis=1)
        count = kept + (bucket > boundary).astype("int64").sum(-1, keepdim=True)
    return smallest, count


def _bucket_mass(probabilities: paddle.Tensor, bucket: paddle.Tensor) -> paddle.Tensor:
    """``[b, buckets]``: sum of the probabilities in each."""
    rows = paddle.arange(probabilities.shape[0]).unsqueeze(-1)
    place = (bucket + rows * _BUCKETS).flatten()
    # One more without mass in the last place, so that there are as many places as there shall be.
    last = rows.max().reshape([1]) * _BUCKETS + (_BUCKETS - 1)
    weights = paddle.concat([probabilities.flatten(), paddle.zeros([1], dtype=probabilities.dtype)])
    mass = paddle.bincount(paddle.concat([place, last]), weights=weights)
    return mass.reshape([-1, _BUCKETS])
