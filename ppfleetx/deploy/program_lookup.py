"""Guesses from a row's own text as operations of a program; see :mod:`ppfleetx.generation.lookup`.

Shape letters: n tokens of the row, k guesses.
"""

from __future__ import annotations

import paddle

_MOST_ALIKE = 3
"""Tokens at the end that are looked for; fewer where so many did not occur before."""
FEWEST_ALIKE = 2
"""A single one says too little."""


def last_occurrence(history: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Where most of the tokens at the end of ``history [n]`` stood last before.

    Args:
        history: at least two tokens.

    Returns:
        The place of the last of them, and how many they are, 0 to 3.
    """
    size = history.shape[0]
    # alike[j]: how many tokens up to and with the j-th are those at the end.
    alike = _equal(history, 0)
    matched = alike
    for back in range(1, _MOST_ALIKE):
        matched = matched * _equal(history, back)
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
    """``[1]`` tokens to guess next, when of ``width`` so many were ``right``: more, the more were."""
    return paddle.where(right >= width, paddle.minimum(2 * width, most), right.clip(min=1))


def _equal(history: paddle.Tensor, back: int) -> paddle.Tensor:
    """``[n - 1]`` int64: whether the token ``back`` places before each one is that before the last one."""
    size = history.shape[0]
    # Before the beginning there is no token: -1 and -2 are none, and differ.
    padded = paddle.concat([paddle.full([_MOST_ALIKE], -1, "int64"), history])
    begin = _MOST_ALIKE - back
    last = paddle.concat([paddle.full([_MOST_ALIKE], -2, "int64"), history])[size + begin - 1]
    return (padded[begin : begin + size - 1] == last).astype("int64")
