"""Prompt lookup, and top-p without sorting the vocabulary, written with operations that Paddle can export.

Shape letters: b number of sequences, V vocabulary size, k number of draft tokens.
"""

from __future__ import annotations

import paddle

from ppfleetx.generation.logits_processors import last_kept, nucleus
from ppfleetx.generation.speculative_decoding import LENGTHS

_MOST_ALIKE, FEWEST_ALIKE = max(LENGTHS), min(LENGTHS)


def last_occurrence(history: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Find an earlier occurrence in ``history`` of its last 1 to 3 tokens. The longest match counts; among
    equally long ones, the latest. Returns the index of the match's last token, and the number of matching
    tokens, which is 0 if there is no match. ``history`` must have at least 2 tokens."""
    size = history.shape[0]
    # Pad with -1, which never matches a token.
    padded = paddle.concat([paddle.full([_MOST_ALIKE], -1, "int64"), history])
    # alike[j]: how many of the tokens up to index j match the last tokens of `history`.
    alike = paddle.zeros([size - 1], "int64")
    matched = paddle.ones([size - 1], "int64")
    for back in range(_MOST_ALIKE):
        begin = _MOST_ALIKE - back
        shifted = padded[begin : begin + size]
        matched = matched * (shifted[:-1] == shifted[-1:]).astype("int64")
        alike = alike + matched
    place = (alike * size + paddle.arange(size - 1)).argmax()
    return place, alike.max()


def drafts_after(history: paddle.Tensor, place: paddle.Tensor, count: paddle.Tensor) -> paddle.Tensor:
    """Return ``count`` draft tokens: the tokens of ``history`` after index ``place``. If there are fewer than
    ``count``, they are repeated cyclically."""
    steps = paddle.arange(count) % (history.shape[0] - 1 - place)
    return history.gather(place + 1 + steps)


def accept(likeliest: paddle.Tensor, drafts: paddle.Tensor) -> paddle.Tensor:
    """Return the number of accepted draft tokens as a tensor ``[1]``. A draft token is accepted if it and all
    draft tokens before it equal the model's likeliest tokens. ``likeliest`` is [k + 1], ``drafts`` is [k]."""
    return (likeliest[:-1] == drafts).astype("int64").cumprod(0).sum().reshape([1])


def next_width(width: paddle.Tensor, right: paddle.Tensor, most: paddle.Tensor) -> paddle.Tensor:
    """Return the number of tokens to draft in the next pass, ``[1]``. If the last pass accepted at least
    ``width`` draft tokens, the number doubles, up to ``most``. Otherwise it becomes max(``right``, 1).

    Args:
        width: the number of tokens to draft in the last pass.
        right: the number of draft tokens that the last pass accepted.
        most: the maximum number of draft tokens per pass.
    """
    return paddle.where(right >= width, paddle.minimum(2 * width, most), right.clip(min=1))


_BUCKETS = 1 << 13


def nucleus_by_buckets(probabilities: paddle.Tensor, top_p: paddle.Tensor) -> paddle.Tensor:
    """Apply top-p to ``probabilities [b, V]`` without sorting all of them. ``top_p`` is ``[1]``. The result
    equals that of :func:`~ppfleetx.generation.logits_processors.nucleus`."""
    # The fourth root spreads probabilities between 1 and 1e-10 evenly enough over the buckets.
    bucket = (probabilities.sqrt().sqrt() * (_BUCKETS - 1)).astype("int64")
    top_p = top_p.astype("float64")
    up_to = _bucket_mass(probabilities, bucket).cumsum(-1)
    above = up_to[:, -1:] - up_to
    # If rounding keeps the total below top_p, every token is kept.
    lowest = (up_to <= 0).astype("int64").sum(-1, keepdim=True)
    boundary = paddle.maximum((above >= top_p).astype("int64").sum(-1, keepdim=True), lowest)
    # Sort only the bucket in which the sum reaches top_p.
    inside = _gathered(probabilities, bucket == boundary)
    falling = paddle.sort(inside, axis=-1, descending=True)
    _, count = last_kept(falling, top_p - paddle.take_along_axis(above, boundary, axis=1))
    size = (falling > 0).astype("int64").sum(-1, keepdim=True)
    count = paddle.maximum(paddle.minimum(count, size), paddle.ones_like(count))
    smallest = paddle.take_along_axis(falling, count - 1, axis=1)
    # Of tokens with equal probabilities, those with lower ids must be kept, as nucleus() does.
    has_equals = ((falling == smallest).astype("int64").sum(-1) > 1).any()
    # On a GPU, rounding can make cumulative sums decrease, so the bucket may be empty.
    if paddle.logical_or(has_equals, (smallest <= 0).any()):
        kept = nucleus(probabilities, top_p)
    else:
        kept = paddle.where(
            probabilities >= smallest, probabilities, paddle.zeros([], dtype=probabilities.dtype)
        )
    return kept


def _gathered(values: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
    """Collect the elements of each row of ``values [b, V]`` where ``mask`` is true. Returns ``[b, m]``, where
    m is the largest number of such elements in a row. Shorter rows are padded on the right with zeros."""
    there = paddle.nonzero(mask)
    row = there[:, 0]
    counts = mask.astype("int64").sum(-1)
    place = paddle.arange(there.shape[0]) - (counts.cumsum() - counts).gather(row)
    width = paddle.maximum(counts.max(), paddle.ones([], "int64"))
    room = paddle.zeros([values.shape[0], width], dtype=values.dtype)
    return paddle.scatter_nd_add(room, paddle.stack([row, place], axis=1), values.gather_nd(there))


def _bucket_mass(probabilities: paddle.Tensor, bucket: paddle.Tensor) -> paddle.Tensor:
    """Return the sum of the probabilities in each bucket, float64 ``[b, number of buckets]``.
    ``bucket [b, V]`` has the index of each token's bucket."""
    rows = paddle.arange(probabilities.shape[0]).unsqueeze(-1)
    place = (bucket + rows * _BUCKETS).flatten()
    # An extra entry of weight 0 in the last bucket makes bincount's result long enough.
    last = rows.max().reshape([1]) * _BUCKETS + (_BUCKETS - 1)
    weights = paddle.concat([probabilities.flatten().astype("float64"), paddle.zeros([1], "float64")])
    mass = paddle.bincount(paddle.concat([place, last]), weights=weights)
    return mass.reshape([-1, _BUCKETS])
