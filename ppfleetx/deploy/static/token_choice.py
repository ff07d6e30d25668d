"""Choosing tokens in an exported program: guesses from a row's own text, and top-p without a sort.

The same as :mod:`ppfleetx.generation.prompt_lookup` and ``processors``, as operations of a program.

Shape letters: n tokens of the row, k guesses.
"""

from __future__ import annotations

import paddle

from ppfleetx.generation.processors import last_kept, nucleus
from ppfleetx.generation.prompt_lookup import LENGTHS

_MOST_ALIKE, FEWEST_ALIKE = max(LENGTHS), min(LENGTHS)


def last_occurrence(history: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Where most of the tokens at the end of ``history [n]`` stood last before.

    Args:
        history: at least two tokens.

    Returns:
        The place of the last of them, and how many they are, 0 to 3.
    """
    size = history.shape[0]
    # -1, which is no token, stands before the first one: nothing there can be alike.
    padded = paddle.concat([paddle.full([_MOST_ALIKE], -1, "int64"), history])
    # alike[j]: how many tokens up to and with the j-th are those at the end.
    alike = paddle.zeros([size - 1], "int64")
    matched = paddle.ones([size - 1], "int64")
    for back in range(_MOST_ALIKE):
        begin = _MOST_ALIKE - back
        shifted = padded[begin : begin + size]
        matched = matched * (shifted[:-1] == shifted[-1:]).astype("int64")
        alike = alike + matched
    place = (alike * size + paddle.arange(size - 1)).argmax()
    return place, alike.max()


def follow(history: paddle.Tensor, place: paddle.Tensor, count: paddle.Tensor) -> paddle.Tensor:
    """``[count]`` tokens that followed ``place``; what reaches the end is taken for a cycle."""
    steps = paddle.arange(count) % (history.shape[0] - 1 - place)
    return history.gather(place + 1 + steps)


def accept(likeliest: paddle.Tensor, guesses: paddle.Tensor) -> paddle.Tensor:
    """How many of ``guesses [k]``, from the first on, are what the model gave: ``likeliest [k + 1]``."""
    return (likeliest[:-1] == guesses).astype("int64").cumprod(0).sum().reshape([1])


def next_width(width: paddle.Tensor, right: paddle.Tensor, most: paddle.Tensor) -> paddle.Tensor:
    """:func:`ppfleetx.generation.prompt_lookup.next_width` of tensors ``[1]``; of ``width`` guesses."""
    return paddle.where(right >= width, paddle.minimum(2 * width, most), right.clip(min=1))


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
