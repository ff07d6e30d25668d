"""Guesses from a row's own text as operations of a program; see :mod:`ppfleetx.generation.prompt_lookup`.

Shape letters: n tokens of the row, k guesses.
"""

from __future__ import annotations

import paddle

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
