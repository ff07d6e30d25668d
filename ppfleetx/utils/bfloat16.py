"""Conversion between float32 and bfloat16 in NumPy, which has no bfloat16: arrays hold its bits as uint16."""

from __future__ import annotations

import numpy as np


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 ``values`` to the nearest bfloat16, ties to even, and return the bits as uint16. NaN
    stays NaN."""
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Convert bfloat16 numbers, given as ``bits``, to float32. The conversion is exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
