"""Which sequences of a corpus belong to training, evaluation and test."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ppfleetx.config.errors import DataError

MODES = ("Train", "Eval", "Test")


def parse_split(split: str | Sequence[float]) -> list[float]:
    """Three non-negative weights that sum to 1, from ``"949,50,1"``, ``[949, 50, 1]`` or fewer numbers.

    Raises:
        DataError: more than three numbers, a negative one, or nothing above zero.
    """
    numbers = re.findall(r"[-.0-9]+", split) if isinstance(split, str) else split
    try:
        weights = [float(number) for number in numbers]
    except ValueError as error:
        raise DataError(f"split {split!r} holds something that is not a number") from error
    weights += [0.0] * (len(MODES) - len(weights))
    if len(weights) > len(MODES):
        raise DataError(f"split {split!r} has more than the {len(MODES)} parts {', '.join(MODES)}")
    if not all(np.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights) > 0:
        raise DataError(f"split {split!r} needs non-negative numbers, at least one of them above zero")
    return (np.array(weights) / np.sum(np.array(weights))).tolist()


def split_ranges(num_sequences: int, split: str | Sequence[float]) -> list[tuple[int, int]]:
    """Range ``[first, last)`` of sequences for each of Train, Eval and Test.

    The borders are the running sums of the weights times ``num_sequences``, each rounded half to even: what
    Megatron-LM does, so that a corpus splits at the same sequence. A range may be empty.
    """
    borders = [0.0]
    for weight in parse_split(split):
        borders.append(borders[-1] + weight)
    rounded = [round(border * float(num_sequences)) for border in borders]
    return list(pairwise(rounded))
