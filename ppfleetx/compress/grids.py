"""Grids of numbers for quantisation: symmetric integers of b bits, times a scale.

A number x is held as q = round(x / scale), an integer from -(2^(b-1) - 1) to 2^(b-1) - 1, and read as
q * scale. A matrix has one scale, or one per output channel, or one per group of input features and output
channel; the shape of the scales says which. Rounding is to the nearest, halves to the even one.

Shape letters: k input features, n output features, g groups of k / g consecutive input features.
Scales are ``[1, 1]`` (whole matrix), ``[1, n]`` (channels) or ``[g, n]`` (groups).

Functions take NumPy arrays; those with ``tensor`` in their name Paddle's tensors, and may be trained through.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import paddle

from ppfleetx.config.errors import DataError

ScaleMethod = Literal["absmax", "mse"]
BITS = range(2, 17)
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
"""Scale of what is zero; smaller ones would not be normal numbers."""
_SHRINK = np.linspace(1.0, 0.5, 26, dtype=np.float32)[1:]
"""Shares of the largest magnitude that ``mse`` tries as the end of the grid."""


def largest_level(bits: int) -> int:
    """The largest integer of a symmetric grid of this many bits: 127 for 8.

    Raises:
        ValueError: there is no such grid.
    """
    if bits not in BITS:
        raise ValueError(f"a grid has {BITS[0]} to {BITS[-1]} bits, not {bits}")
    return (1 << (bits - 1)) - 1


def num_groups(in_features: int, group_size: int | None) -> int:
    """How many groups of ``group_size`` input features there are; one for None.

    Raises:
        ValueError: the size does not divide the number of features.
    """
    if group_size is None:
        return 1
    if group_size < 1 or in_features % group_size:
        raise ValueError(f"groups of {group_size} do not divide {in_features} input features")
    return in_features // group_size


def scales_of(
    weight: np.ndarray,
    bits: int,
    *,
    per_tensor: bool = False,
    group_size: int | None = None,
    method: ScaleMethod = "absmax",
) -> np.ndarray:
    """Scales of a matrix, float32.

    Args:
        weight: ``[k, n]``.
        bits: of the grid.
        per_tensor: one scale for all; else one per output channel, and per group where there are some.
        group_size: input features of a group; None: all.
        method: the grid ends at the largest magnitude (``absmax``), or where the squared error of the
            rounded values is smallest (``mse``, which tries 26 ends from the largest down to half of it).

    Returns:
        ``[1, 1]``, ``[1, n]`` or ``[g, n]``.

    Raises:
        ValueError: there is no such grid.
        DataError: a value is NaN or infinite.
    """
    if not np.isfinite(weight).all():
        raise DataError("the matrix holds NaN or infinite values, which have no place on a grid")
    if per_tensor and group_size is not None:
        raise ValueError("one scale for all, or one per group: not both")
    grouped = _grouped(np.asarray(weight, np.float32), num_groups(weight.shape[0], group_size))
    axes = (1, 2) if per_tensor else (1,)
    largest = np.abs(grouped).max(axis=axes, keepdims=True)
    whole = np.clip(largest / np.float32(largest_level(bits)), SMALLEST_SCALE, _largest_scale(bits))
    best = whole if method == "absmax" else _least_error(grouped, whole, bits, axes)
    return best.reshape(best.shape[0], best.shape[2])


def quantize(weight: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """``weight [k, n]`` on the grid: int8 up to 8 bits, int16 above.

    Raises:
        ValueError: the scales are not those of such a matrix.
    """
    grouped = _grouped(np.asarray(weight, np.float32), _groups_in(weight.shape, scales.shape))
    rounded = _rounded(grouped, scales[:, np.newaxis].astype(np.float32), bits)
    return rounded.astype(np.int8 if bits <= 8 else np.int16).reshape(weight.shape)


def dequantize(levels: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The values of integers ``[k, n]``, float32.

    Raises:
        ValueError: the scales are not those of such a matrix.
    """
    grouped = _grouped(levels.astype(np.float32), _groups_in(levels.shape, scales.shape))
    return (grouped * scales[:, np.newaxis].astype(np.float32)).reshape(levels.shape)


def tensor_scales(
    weight: paddle.Tensor, bits: int, *, per_tensor: bool = False, group_size: int | None = None
) -> paddle.Tensor:
    """:func:`scales_of` by ``absmax``, without gradients. Values that are not finite are not looked for."""
    rows, columns = weight.shape
    groups = num_groups(rows, group_size)
    magnitude = weight.detach().abs().reshape([groups, rows // groups, columns])
    largest = magnitude.max(axis=[1, 2] if per_tensor else [1], keepdim=True)
    scales = (largest / largest_level(bits)).clip(min=SMALLEST_SCALE, max=_largest_scale(bits))
    return scales.reshape([groups, 1 if per_tensor else columns])


def round_tensor(x: paddle.Tensor, scales: paddle.Tensor, bits: int) -> paddle.Tensor:
    """``x`` moved onto the grid, as numbers: ``dequantize(quantize(x))``.

    The gradient is that of the identity inside of the grid's ends and zero outside (the straight-through
    estimator, Bengio et al., 2013). NaN stays NaN.

    Args:
        x: a matrix ``[k, n]`` with scales of its groups ``[g, n]``, or anything that ``scales`` are broadcast
            against.
        scales: float32.
        bits: of the grid.
    """
    largest = largest_level(bits)
    is_grouped = scales.ndim == 2 and scales.shape[0] > 1
    grouped = x.reshape([scales.shape[0], -1, x.shape[-1]]) if is_grouped else x
    step = scales.unsqueeze(1) if is_grouped else scales
    end = step * largest
    clipped = paddle.minimum(paddle.maximum(grouped, -end), end)
    held = paddle.round(clipped.detach() / step) * step
    return (clipped + (held - clipped).detach()).reshape(x.shape)


def _grouped(matrix: np.ndarray, groups: int) -> np.ndarray:
    """``[k, n]`` as ``[g, k / g, n]``."""
    rows, columns = matrix.shape
    return matrix.reshape(groups, rows // groups, columns)


def _groups_in(shape: tuple[int, ...], scales: tuple[int, ...]) -> int:
    if len(scales) != 2 or not scales[0] or shape[0] % scales[0] or scales[1] not in (1, shape[1]):
        raise ValueError(f"scales of shape {list(scales)} do not fit a matrix of shape {list(shape)}")
    return scales[0]


def _largest_scale(bits: int) -> float:
    """The largest whose grid ends within float32."""
    return float(np.nextafter(np.finfo(np.float32).max / np.float32(largest_level(bits)), np.float32(0)))


def _rounded(grouped: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    largest = largest_level(bits)
    return np.clip(np.rint(grouped / scales), -largest, largest)


def _least_error(grouped: np.ndarray, whole: np.ndarray, bits: int, axes: tuple[int, ...]) -> np.ndarray:
    best, least = whole, _squared_error(grouped, whole, bits, axes)
    for scales in _shrunk(whole):
        error = _squared_error(grouped, scales, bits, axes)
        best = np.where(error < least, scales, best)
        least = np.minimum(error, least)
    return best


def _shrunk(whole: np.ndarray) -> Iterator[np.ndarray]:
    return (np.maximum(whole * share, np.float32(SMALLEST_SCALE)) for share in _SHRINK)


def _squared_error(grouped: np.ndarray, scales: np.ndarray, bits: int, axes: tuple[int, ...]) -> np.ndarray:
    """In units of the scale of the whole grid, so that small numbers do not vanish when squared."""
    difference = (_rounded(grouped, scales, bits) - grouped / scales).astype(np.float64)
    return np.square(difference * scales).sum(axis=axes, keepdims=True)
