"""Top-p in an exported program: where to stop, without sorting a vocabulary.

Paddle's sort of 50000 probabilities takes longer than a small model does. Here their mass is first summed in
buckets; p is reached in one of them, and only the few tokens of that one are put in order. The generator's
``nucleus`` does the same with NumPy where it runs on a CPU.
"""

from __future__ import annotations

import paddle

from ppfleetx.generation.processors import last_kept, nucleus

_BUCKETS = 1 << 13


def nucleus_by_buckets(probabilities: paddle.Tensor, top_p: paddle.Tensor) -> paddle.Tensor:
    """:func:`~ppfleetx.generation.processors.nucleus` of ``probabilities [b, V]`` and ``top_p [1]``."""
    # The fourth root spreads what models give, from 1 down to 1e-10, over the buckets.
    bucket = (probabilities.sqrt().sqrt() * (_BUCKETS - 1)).astype("int64")
    top_p = top_p.astype("float64")
    up_to = _bucket_mass(probabilities, bucket).cumsum(-1)
    above = up_to[:, -1:] - up_to
    # Where all that there is does not sum to p, which only rounding brings about, the smallest is the last.
    lowest = (up_to <= 0).astype("int64").sum(-1, keepdim=True)
    boundary = paddle.maximum((above >= top_p).astype("int64").sum(-1, keepdim=True), lowest)
    inside = _gathered(probabilities, bucket == boundary)
    falling = paddle.sort(inside, axis=-1, descending=True)
    _, count = last_kept(falling, top_p - paddle.take_along_axis(above, boundary, axis=1))
    size = (falling > 0).astype("int64").sum(-1, keepdim=True)
    count = paddle.maximum(paddle.minimum(count, size), paddle.ones_like(count))
    smallest = paddle.take_along_axis(falling, count - 1, axis=1)
    has_equals = ((falling == smallest).astype("int64").sum(-1) > 1).any()  # of which the lower ids stay
    # Sums of a GPU may fall where they should rise, and lead to a bucket without anything in it.
    if paddle.logical_or(has_equals, (smallest <= 0).any()):
        kept = nucleus(probabilities, top_p)
    else:
        kept = paddle.where(
            probabilities >= smallest, probabilities, paddle.zeros([], dtype=probabilities.dtype)
        )
    return kept


def _gathered(values: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
    """``[b, m]``: those of ``values [b, V]`` that ``mask`` names, side by side, then zeros."""
    there = paddle.nonzero(mask)
    row = there[:, 0]
    counts = mask.astype("int64").sum(-1)
    place = paddle.arange(there.shape[0]) - (counts.cumsum() - counts).gather(row)
    width = paddle.maximum(counts.max(), paddle.ones([], "int64"))
    room = paddle.zeros([values.shape[0], width], dtype=values.dtype)
    return paddle.scatter_nd_add(room, paddle.stack([row, place], axis=1), values.gather_nd(there))


def _bucket_mass(probabilities: paddle.Tensor, bucket: paddle.Tensor) -> paddle.Tensor:
    """``[b, buckets]`` float64: sum of the probabilities in each."""
    rows = paddle.arange(probabilities.shape[0]).unsqueeze(-1)
    place = (bucket + rows * _BUCKETS).flatten()
    # One more without mass in the last place, so that there are as many places as there shall be.
    last = rows.max().reshape([1]) * _BUCKETS + (_BUCKETS - 1)
    weights = paddle.concat([probabilities.flatten().astype("float64"), paddle.zeros([1], "float64")])
    mass = paddle.bincount(paddle.concat([place, last]), weights=weights)
    return mass.reshape([-1, _BUCKETS])
