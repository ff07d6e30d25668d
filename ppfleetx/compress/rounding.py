"""Round matrices to low-bit grids: round to nearest, GPTQ, SmoothQuant, and the grid of quantization-aware
training.

A grid is the set of values to which elements can be rounded. An integer q stands for ``q * scale`` on a
symmetric grid, and for ``q * scale + offset`` on an asymmetric grid.

A matrix is ``[k, n]``: k input features, n output features. Input features may be divided into g groups of
``k / g`` consecutive ones. Scales of symmetric grids are float32: ``[1, 1]``, one for the whole matrix;
``[1, n]``, one per output feature; or ``[g, n]``, one per group and output feature. Scales and offsets of
asymmetric grids are one float16 array ``[2 g, n]``: for each group a row of scales and then a row of offsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import paddle

from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.sections.compress import QUANTIZER, Form, QuantizationConfig

ScaleMethod = Literal["absmax", "mse"]
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
"""The smallest scale, used if all elements are zero. Smaller float32 numbers are denormal."""
_SHRINK = np.linspace(1.0, 0.5, 26, dtype=np.float32)[1:]
"""Fractions of the largest magnitude that the method ``mse`` tries as the largest value of the grid."""
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Fractions of a group's range, maximum minus minimum, to try as the range of an asymmetric grid."""
_LARGEST_HALF, _SMALLEST_HALF = np.float32(65504), np.float32(2**-24)


def largest_level(bits: int) -> int:
    """Return the largest integer of a symmetric grid with this many bits, such as 127 for 8."""
    return (1 << (bits - 1)) - 1


def _num_groups(in_features: int, group_size: int | None) -> int:
    return 1 if group_size is None else in_features // group_size


def scales_of(
    weight: np.ndarray,
    bits: int,
    *,
    per_tensor: bool = False,
    group_size: int | None = None,
    method: ScaleMethod = "absmax",
) -> np.ndarray:
    """Compute scales for rounding ``weight [k, n]`` to a symmetric grid.

    Args:
        per_tensor: whether to use one scale for the whole matrix, not one per output feature and group.
        group_size: the number of consecutive input features that form a group; None: all input features are
            one group.
        method: ``absmax`` makes the largest magnitude the largest value of the grid. ``mse`` searches for the
            scale with the smallest squared rounding error.

    Returns float32 ``[1, 1]`` if ``per_tensor``, otherwise ``[g, n]`` for g groups. Raises DataError if an
    element is NaN or infinite.
    """
    if not np.isfinite(weight).all():
        raise DataError("the matrix holds NaN or infinite values, which have no place on a grid")
    grouped = _grouped(np.asarray(weight, np.float32), _num_groups(weight.shape[0], group_size))
    axes = (1, 2) if per_tensor else (1,)
    largest = np.abs(grouped).max(axis=axes, keepdims=True)
    whole = np.clip(largest / np.float32(largest_level(bits)), SMALLEST_SCALE, _largest_scale(bits))
    best = whole if method == "absmax" else _least_error(grouped, whole, bits, axes)
    return best.reshape(best.shape[0], best.shape[2])


def asymmetric_scales_of(weight: np.ndarray, bits: int, group_size: int | None = None) -> np.ndarray:
    """Compute scales and offsets for rounding ``weight [k, n]`` to an asymmetric grid.

    Returns float16 ``[2 g, n]`` for g groups of input features: for each group a row of scales and then a
    row of offsets. Raises DataError if a weight is NaN, infinite, or too large for float16.
    """
    if not (np.abs(weight) <= _LARGEST_HALF).all():  # also finds NaN
        raise DataError(
            f"the matrix holds NaN or infinite values or values beyond {_LARGEST_HALF:,.0f}, which have no "
            "place on a grid with offsets"
        )
    grouped = _grouped(np.asarray(weight, np.float32), _num_groups(weight.shape[0], group_size))
    # For each group and output feature, choose the grid with the smallest squared error.
    best, least = None, None
    for grid in _grids(grouped, bits):
        # Try the grid as it is, and after a least-squares fit to the weights.
        for _ in range(2):
            levels = _rounded_with_offsets(grouped, *grid, bits)
            error = np.square(levels * grid[0] + grid[1] - grouped).sum(axis=1, keepdims=True)
            if best is None:
                best, least = grid, error
            else:
                is_less = error < least
                best = tuple(np.where(is_less, *pair) for pair in zip(grid, best, strict=True))
                least = np.where(is_less, error, least)
            middle = levels.mean(axis=1, keepdims=True)
            levels -= middle
            spread = np.maximum(np.square(levels).sum(axis=1, keepdims=True), 1)
            grid = _grid_through(
                (levels * grouped).sum(axis=1, keepdims=True) / spread,
                grouped.mean(axis=1, keepdims=True),
                at=middle,
            )
    return np.concatenate(best, axis=1).reshape(-1, weight.shape[1]).astype(np.float16)


def _grids(grouped: np.ndarray, bits: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield candidates for the best asymmetric grid, each as (scale, offset), both ``[g, 1, n]``.

    Args:
        grouped: the matrix ``[g, k / g, n]``.
    """
    low, high = (of(grouped, axis=1, keepdims=True) for of in (np.min, np.max))
    largest = np.maximum(high, -low)
    if bits == 8:  # Q8_0
        yield _grid_through(largest / 127, np.float32(0), at=0)
    else:  # Q4_0: the element of largest magnitude is the highest level if positive, else the lowest
        end = 2 ** (bits - 1)
        yield _grid_through(
            largest / end, np.where(high > -low, high, low), at=np.where(high > -low, end - 1, -end)
        )
    for share in _SHARES if bits < 8 else (1.0,):
        yield _grid_through((high - low) * np.float32(share / (2**bits - 1)), (high + low) / 2, at=-0.5)


def _grid_through(
    step: np.ndarray, value: np.ndarray, at: np.ndarray | float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scale and the offset of an asymmetric grid that contains a given value. The offset is chosen
    so that ``at * scale + offset = value``. Scale and offset are rounded to float16.

    Args:
        step: the scale before rounding.
        value: the given value.
        at: the integer that stands for ``value``.
    """
    step = np.clip(step, _SMALLEST_HALF, _LARGEST_HALF).astype(np.float16).astype(np.float32)
    offset = np.clip(value - at * step, -_LARGEST_HALF, _LARGEST_HALF)
    return step, offset.astype(np.float16).astype(np.float32)


def _rounded_with_offsets(values: np.ndarray, scale: np.ndarray, offset: np.ndarray, bits: int) -> np.ndarray:
    return np.clip(np.rint((values - offset) / scale), -(2 ** (bits - 1)), largest_level(bits))


def quantize(weight: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """Round ``weight [k, n]`` to a symmetric grid. Returns the integers: int8 up to 8 bits, int16 above."""
    grouped = _grouped(np.asarray(weight, np.float32), len(scales))
    rounded = _rounded(grouped, scales[:, np.newaxis].astype(np.float32), bits)
    return rounded.astype(np.int8 if bits <= 8 else np.int16).reshape(weight.shape)


def dequantize(levels: np.ndarray, scales: np.ndarray, *, asymmetric: bool = False) -> np.ndarray:
    """Convert quantized integers ``levels [k, n]`` to float32. If ``asymmetric``, ``scales`` has a row of
    offsets after each row of scales."""
    steps = scales[0::2] if asymmetric else scales
    values = _grouped(levels.astype(np.float32), len(steps)) * steps[:, np.newaxis].astype(np.float32)
    if asymmetric:
        values = values + scales[1::2, np.newaxis].astype(np.float32)
    return values.reshape(levels.shape)


def _grouped(matrix: np.ndarray, groups: int) -> np.ndarray:
    """Reshape ``[k, n]`` to ``[g, k / g, n]``: separate the g groups of input features."""
    rows, columns = matrix.shape
    return matrix.reshape(groups, rows // groups, columns)


def _largest_scale(bits: int) -> float:
    """Return the largest scale with which no value of a symmetric grid overflows float32."""
    return float(np.nextafter(np.finfo(np.float32).max / np.float32(largest_level(bits)), np.float32(0)))


def _rounded(grouped: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    largest = largest_level(bits)
    return np.clip(np.rint(grouped / scales), -largest, largest)


def _least_error(grouped: np.ndarray, whole: np.ndarray, bits: int, axes: tuple[int, ...]) -> np.ndarray:
    best, least = whole, _squared_error(grouped, whole, bits, axes)
    for share in _SHRINK:
        scales = np.maximum(whole * share, np.float32(SMALLEST_SCALE))
        error = _squared_error(grouped, scales, bits, axes)
        best = np.where(error < least, scales, best)
        least = np.minimum(error, least)
    return best


def _squared_error(grouped: np.ndarray, scales: np.ndarray, bits: int, axes: tuple[int, ...]) -> np.ndarray:
    # float64, because squares of small weights underflow in float32
    difference = (_rounded(grouped, scales, bits) - grouped / scales).astype(np.float64)
    return np.square(difference * scales).sum(axis=axes, keepdims=True)


_BLOCK = 128  # input features per block of error propagation
_LEAST_CLIP = np.float32(0.01)  # lower limit of a learned clip, the same as in training
_DAMPING = 0.01  # this fraction of the Hessian's mean diagonal is added to the diagonal


@dataclass(frozen=True)
class Stored:
    """A quantized matrix ``[k, n]``, with k input and n output features.

    Attributes:
        levels: the integers ``[k, n]``, int8.
        scale: float32 ``[g, n]``, a row of scales for each of g groups of input features. In asymmetric
            formats, it is float16 ``[2 g, n]``: for each group a row of scales and then a row of offsets.
        form: the storage format.
        is_table: whether this is an embedding table. If so, both arrays are transposed: ``levels`` is
            ``[n, k]``, with one row per token.

    For experts, both arrays have an additional first dimension: the expert.
    """

    levels: np.ndarray
    scale: np.ndarray
    form: Form
    is_table: bool = False

    def packed(self) -> np.ndarray:
        """Return the integers as they are stored: int8 ``[k, n]`` for 8 bits, or uint8 ``[k / 2, n]`` with
        two 4-bit integers per byte."""
        if self.form.bits == 8:
            return self.levels
        nibbles = (self.levels & 15).astype(np.uint8)
        return nibbles[..., 0::2, :] | (nibbles[..., 1::2, :] << 4)

    def values(self) -> np.ndarray:
        """Return the dequantized matrix, float32 in the shape of ``levels``."""
        read = partial(dequantize, asymmetric=self.form.asymmetric)
        if self.is_table:
            return read(self.levels.T, self.scale.T).T
        if self.levels.ndim == 3:
            return np.stack([read(*one) for one in zip(self.levels, self.scale, strict=True)])
        return read(self.levels, self.scale)

    @property
    def num_bytes(self) -> int:
        return self.levels.size * self.form.bits // 8 + self.scale.nbytes


def check_form(name: str, in_features: int, form: Form) -> None:
    """Raise ConfigError if a layer with ``in_features`` input features cannot be stored in the format
    ``form``."""
    if form.group_size is not None and in_features % form.group_size:
        sizes = [size for size in (512, 256, 128, 64, 32, 16, 8) if in_features % size == 0]
        raise ConfigError(
            f"groups of {form.group_size} do not divide the {in_features} input features of {name}"
            + (f"; {', '.join(map(str, sizes))} would" if sizes else ""),
            key="--group",
            value=form.group_size,
        )


def nearest(weight: np.ndarray, form: Form) -> Stored:
    """Quantize ``weight [k, n]`` by rounding each element to the nearest value of its grid."""
    scale = _scale_of(weight, form)
    if not form.asymmetric:
        return Stored(quantize(weight, scale, form.bits), scale, form)
    grouped = _grouped(np.asarray(weight, np.float32), len(scale) // 2)
    grid = (part[:, np.newaxis].astype(np.float32) for part in (scale[0::2], scale[1::2]))
    levels = _rounded_with_offsets(grouped, *grid, form.bits).astype(np.int8)
    return Stored(levels.reshape(weight.shape), scale, form)


def _scale_of(weight: np.ndarray, form: Form) -> np.ndarray:
    if form.asymmetric:
        return asymmetric_scales_of(weight, form.bits, form.group_size)
    # Clipping the largest weights reduces the error with few bits, but not with 8.
    method = "mse" if form.bits < 8 else "absmax"
    return scales_of(weight, form.bits, group_size=form.group_size, method=method)


def gptq(weight: np.ndarray, hessian: np.ndarray, form: Form) -> Stored:
    """Quantize ``weight [k, n]`` with GPTQ (Frantar et al., 2022). The scales are the same as those of
    :func:`nearest`.

    Args:
        hessian: ``X^T X [k, k]`` in float64, where X are the layer's inputs.
    """
    scale = _scale_of(weight, form)
    size = weight.shape[0]
    # Features with the largest sums of squared inputs are rounded first.
    order = np.argsort(-np.diag(hessian), kind="stable")
    rows = weight[order].astype(np.float32)
    steps, offsets = (scale[0::2], scale[1::2]) if form.asymmetric else (scale, np.zeros_like(scale))
    steps, offsets = (
        np.repeat(part.astype(np.float32), size // len(part), axis=0)[order] for part in (steps, offsets)
    )
    upper = _inverse_factor(hessian[np.ix_(order, order)]).astype(np.float32)
    levels = np.empty(weight.shape, np.int8)
    largest = largest_level(form.bits)
    least = -largest - 1 if form.asymmetric else -largest
    for start in range(0, size, _BLOCK):
        end = min(start + _BLOCK, size)
        errors = np.empty((end - start, weight.shape[1]), np.float32)
        for i in range(start, end):
            level = np.clip(np.rint((rows[i] - offsets[i]) / steps[i]), least, largest)
            levels[order[i]] = level
            errors[i - start] = (rows[i] - level * steps[i] - offsets[i]) / upper[i, i]
            rows[i + 1 : end] -= np.outer(upper[i, i + 1 : end], errors[i - start])
        rows[end:] -= upper[start:end, end:].T @ errors
    return Stored(levels, scale, form)


def _inverse_factor(hessian: np.ndarray) -> np.ndarray:
    """Return the upper triangular matrix U for which ``U^T U`` is the inverse of the damped Hessian."""
    damped = hessian.astype(np.float64)
    diagonal = np.diag(damped)
    added = _DAMPING * (diagonal.mean() or 1.0) + (diagonal == 0)  # keeps unused features invertible
    damped[np.diag_indices_from(damped)] += added
    # With rows and columns reversed before and after, U is the inverse of L in H = L L^T. This is half the
    # work of inverting H.
    lower = paddle.linalg.cholesky(paddle.to_tensor(damped[::-1, ::-1].copy()))
    inverse = paddle.linalg.triangular_solve(lower, paddle.eye(len(damped), dtype="float64"), upper=False)
    return inverse.numpy()[::-1, ::-1]


def weight_error(weight: np.ndarray, dequantized: np.ndarray) -> float:
    """Return the root mean square of the rounding error, divided by the root mean square of ``weight``.
    Returns 0 if ``weight`` is zero.

    Args:
        weight: the matrix before quantization.
        dequantized: the dequantized matrix.
    """
    size = float(np.linalg.norm(weight.astype(np.float64)))
    return float(np.linalg.norm((weight - dequantized).astype(np.float64))) / size if size else 0.0


def output_error(weight: np.ndarray, dequantized: np.ndarray, hessian: np.ndarray) -> float:
    """Return the root mean square error of a layer's output ``X W`` after quantization of W, relative to the
    root mean square of ``X W``.

    Args:
        weight: W ``[k, n]``.
        dequantized: the dequantized W ``[k, n]``.
        hessian: ``X^T X [k, k]``.
    """
    squares = hessian.astype(np.float32)
    error, size = (
        float(np.einsum("kn,kn->", squares @ one, one, dtype=np.float64))
        for one in (weight - dequantized, weight)
    )
    return float(np.sqrt(max(error, 0.0) / size)) if size > 0 else 0.0


def on_trained_grid(
    weight: np.ndarray, linear: str, form: Form, cfg: QuantizationConfig, checkpoint: Checkpoint
) -> Stored | None:
    """Quantize ``weight [k, n]`` to the grid of quantization-aware training. Returns None if training did not
    round this layer, or rounded it to more bits than ``form`` has.

    Args:
        linear: the name of the layer.
        form: the storage format.
        cfg: the settings of the training.
        checkpoint: the trained model, with the clipping factors if training learned them.
    """
    kind = "ColumnParallelLinear" if linear.endswith(("qkv", "fc1")) else "RowParallelLinear"
    if not cfg.quantizes(linear, kind) or cfg.weight_bits > form.bits:
        return None
    scale = scales_of(weight, cfg.weight_bits, per_tensor=cfg.weight_quantize_type == "abs_max")
    clip = f"{linear}.{QUANTIZER}.weight_clip"
    if clip in checkpoint.names():
        scale = scale * np.maximum(checkpoint.read(clip).astype(np.float32), _LEAST_CLIP)
    levels = quantize(weight, scale, cfg.weight_bits).astype(np.int8)
    groups = _num_groups(weight.shape[0], form.group_size)
    return Stored(levels, np.broadcast_to(scale, (groups, weight.shape[1])).copy(), form)


_NORM_OF = {"attention.qkv": "input_norm", "mlp.fc1": "mlp_norm"}
_SMALLEST = 1e-5


def smooth_block(
    parameters: Mapping[str, paddle.Tensor], largest: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Apply SmoothQuant (Xiao et al., 2022) to one block: to each linear layer whose input is the output of a
    norm.

    Args:
        parameters: the parameters of the block, which are changed in place.
        largest: the largest magnitude ``[k]`` of each input feature, by linear layer.

    Returns the factors ``[k]`` by which input features were divided, by linear layer.
    """
    factors = {}
    for linear, norm in _after_norms(parameters):
        weight = parameters[f"{linear}.weight"]
        of_weight = np.maximum(np.abs(weight.numpy()).max(axis=1), _SMALLEST)
        factor = np.sqrt(np.maximum(largest[linear], _SMALLEST) / of_weight).astype(np.float32)
        weight.set_value(weight.numpy() * factor[:, np.newaxis])
        for name in (f"{norm}.weight", f"{norm}.bias"):
            if name in parameters:
                parameters[name].set_value(parameters[name].numpy() / factor)
        factors[linear] = factor
    return factors


def _after_norms(parameters: Mapping[str, paddle.Tensor]) -> Iterator[tuple[str, str]]:
    """Yield (name of the linear layer, name of the norm) for each linear layer whose input comes from a
    norm. Norms without weights are left out."""
    for name in list(parameters):
        for linear, norm in _NORM_OF.items():
            block, found, _ = name.rpartition(f".{linear}.weight")
            if found and f"{block}.{norm}.weight" in parameters:
                yield f"{block}.{linear}", f"{block}.{norm}"
