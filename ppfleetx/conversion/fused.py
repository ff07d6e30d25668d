"""Matrices inside a fused parameter, as its declaration says: queries, keys and values; gate and up.

They are interleaved along the output features, which are the last dimension of a weight and of a bias.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ppfleetx.nn.param_spec import Part


def join_parts(parts: Sequence[Part], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The fused parameter of these matrices, in the order of ``parts``."""
    period, lead = parts[0].period, arrays[0].shape[:-1]
    pieces = [array.reshape(*lead, -1, part.width) for part, array in zip(parts, arrays, strict=True)]
    assert sum(part.width for part in parts) == period
    return np.concatenate(pieces, axis=-1).reshape(*lead, -1)


def split_parts(parts: Sequence[Part], fused: np.ndarray) -> tuple[np.ndarray, ...]:
    """The inverse of :func:`join_parts`."""
    lead = fused.shape[:-1]
    periods = fused.reshape(*lead, -1, parts[0].period)
    return tuple(periods[..., p.offset : p.offset + p.width].reshape(*lead, -1) for p in parts)
