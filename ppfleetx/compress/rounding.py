"""Matrices stored in few bits: rounded to nearest, with GPTQ, or as training has rounded them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.compress.grids import ScaleMethod, dequantize, largest_level, quantize, scales_of
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.compress import QUANTIZER, Form, QuantizationConfig

_BLOCK = 128  # input features whose errors are spread together
_LEAST_CLIP = np.float32(0.01)  # as in training: a learned clip never closes
_DAMPING = 0.01  # of the mean diagonal of the Hessian, added to it


@dataclass(frozen=True)
class Stored:
    """A matrix ``[k, n]`` on its grid: ``levels [k, n]`` int8 and ``scale [g, n]`` float32."""

    levels: np.ndarray
    scale: np.ndarray
    form: Form

    def packed(self) -> np.ndarray:
        """The elements as a checkpoint holds them: int8, or two of 4 bits in a byte, ``[k / 2, n]`` uint8."""
        if self.form.bits == 8:
            return self.levels
        nibbles = (self.levels & 15).astype(np.uint8)
        return nibbles[0::2] | (nibbles[1::2] << 4)

    def values(self) -> np.ndarray:
        """What is stored, ``[k, n]`` float32."""
        return dequantize(self.levels, self.scale)

    @property
    def num_bytes(self) -> int:
        return self.levels.size * self.form.bits // 8 + self.scale.nbytes


def method_of_scales(form: Form) -> ScaleMethod:
    """Few bits gain by leaving out the largest numbers; 8 do not."""
    return "mse" if form.bits < 8 else "absmax"


def check_form(name: str, in_features: int, form: Form) -> None:
    """Whether a matrix can be stored so.

    Raises:
        ConfigError: groups do not divide the input features, or no kernel supports this form.
    """
    if form.group_size is not None and in_features % form.group_size:
        sizes = [size for size in (512, 256, 128, 64, 32, 16, 8) if in_features % size == 0]
        raise ConfigError(
            f"groups of {form.group_size} do not divide the {in_features} input features of {name}"
            + (f"; {', '.join(map(str, sizes))} would" if sizes else ""),
            key="--group",
            value=form.group_size,
        )
    if form.bits == 4 and in_features % 8:
        raise ConfigError(
            f"{name} has {in_features} input features, and kernels read 4-bit weights 8 at a time; leave it "
            f"as it is with --skip '{name}'",
            key="--to",
            value="int4",
        )


def nearest(weight: np.ndarray, form: Form) -> Stored:
    """Each element of ``[k, n]`` on the nearest point of its grid."""
    scale = scales_of(weight, form.bits, group_size=form.group_size, method=method_of_scales(form))
    return Stored(quantize(weight, scale, form.bits), scale, form)


def compensated(weight: np.ndarray, hessian: np.ndarray, form: Form) -> Stored:
    """Round one input feature after the other and let those that follow make up for the error.

    Frantar et al., "GPTQ", 2022: features in falling order of the Hessian's diagonal, scales those of
    :func:`nearest`.

    Args:
        weight: ``[k, n]``.
        hessian: ``X^T X [k, k]`` of the matrix's inputs, float64.
        form: of what is stored.
    """
    scale = scales_of(weight, form.bits, group_size=form.group_size, method=method_of_scales(form))
    size = weight.shape[0]
    order = np.argsort(-np.diag(hessian), kind="stable")
    rows = weight[order].astype(np.float32)
    steps = np.repeat(scale, size // scale.shape[0], axis=0)[order]
    upper = _inverse_factor(hessian[np.ix_(order, order)]).astype(np.float32)
    levels = np.empty(weight.shape, np.int8)
    largest = largest_level(form.bits)
    for start in range(0, size, _BLOCK):
        end = min(start + _BLOCK, size)
        errors = np.empty((end - start, weight.shape[1]), np.float32)
        for i in range(start, end):
            level = np.clip(np.rint(rows[i] / steps[i]), -largest, largest)
            levels[order[i]] = level
            errors[i - start] = (rows[i] - level * steps[i]) / upper[i, i]
            rows[i + 1 : end] -= np.outer(upper[i, i + 1 : end], errors[i - start])
        rows[end:] -= upper[start:end, end:].T @ errors
    return Stored(levels, scale, form)


def _inverse_factor(hessian: np.ndarray) -> np.ndarray:
    """Upper triangular U with ``U^T U`` the inverse of the damped Hessian."""
    damped = hessian.astype(np.float64)
    diagonal = np.diag(damped)
    added = _DAMPING * (diagonal.mean() or 1.0) + (diagonal == 0)  # what was never seen may be anything
    damped[np.diag_indices_from(damped)] += added
    return np.linalg.cholesky(np.linalg.inv(damped)).T


def weight_error(weight: np.ndarray, held: np.ndarray) -> float:
    """Root mean square of what rounding changed, over that of the matrix; 0 for a matrix of zeros."""
    size = float(np.linalg.norm(weight.astype(np.float64)))
    return float(np.linalg.norm((weight - held).astype(np.float64))) / size if size else 0.0


def output_error(weight: np.ndarray, held: np.ndarray, hessian: np.ndarray) -> float:
    """The same of the products with the inputs that ``hessian [k, k]`` was summed over."""
    change = (weight - held).astype(np.float64)
    size = float(np.einsum("kn,kn->", hessian @ weight, weight, dtype=np.float64))
    error = float(np.einsum("kn,kn->", hessian @ change, change, dtype=np.float64))
    return float(np.sqrt(max(error, 0.0) / size)) if size > 0 else 0.0


def on_trained_grid(
    weight: np.ndarray, linear: str, form: Form, cfg: QuantizationConfig, checkpoint: Checkpoint
) -> Stored | None:
    """The linear's weight ``[k, n]`` as training rounded it.

    None if training did not round it, or rounded it to more bits than are stored.

    Args:
        weight: as trained.
        linear: canonical name.
        form: of what is stored.
        cfg: how it was trained.
        checkpoint: has the learned clip, if there is one.
    """
    kind = "ColumnParallelLinear" if linear.endswith(("qkv", "fc1")) else "RowParallelLinear"
    if not cfg.quantizes(linear, kind) or cfg.weight_bits > form.bits:
        return None
    scale = scales_of(weight, cfg.weight_bits, per_tensor=cfg.weight_quantize_type == "abs_max")
    clip = f"{linear}.{QUANTIZER}.weight_clip"
    if clip in checkpoint.names():
        scale = scale * np.maximum(checkpoint.read(clip).astype(np.float32), _LEAST_CLIP)
    levels = quantize(weight, scale, cfg.weight_bits).astype(np.int8)
    groups = 1 if form.group_size is None else weight.shape[0] // form.group_size
    return Stored(levels, np.broadcast_to(scale, (groups, weight.shape[1])).copy(), form)
