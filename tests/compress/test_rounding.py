"""Grids of numbers: ends, errors, groups, gradients, and what has no place on them."""

import numpy as np
import pytest

from ppfleetx.compress import rounding
from ppfleetx.config.errors import DataError


def _weight(rows=32, columns=6, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 12, 16])
@pytest.mark.parametrize("kind", [{}, {"per_tensor": True}, {"group_size": 8}])
def test_no_value_moves_by_more_than_half_a_step(bits, kind):
    weight = _weight()
    scales = rounding.scales_of(weight, bits, **kind)
    levels = rounding.quantize(weight, scales, bits)
    step = np.repeat(scales, 32 // scales.shape[0], axis=0)
    assert scales.shape == {"per_tensor": (1, 1), "group_size": (4, 6)}.get(next(iter(kind), ""), (1, 6))
    assert levels.dtype == (np.int8 if bits <= 8 else np.int16)
    assert np.abs(levels).max() == rounding.largest_level(bits)
    assert (np.abs(rounding.dequantize(levels, scales) - weight) <= 0.5001 * step + 1e-6).all()


def test_scales_by_least_squares_are_never_worse_and_mostly_better():
    weight = _weight(256, 64)
    errors = {}
    for method in ("absmax", "mse"):
        scales = rounding.scales_of(weight, 4, method=method)
        held = rounding.dequantize(rounding.quantize(weight, scales, 4), scales)
        errors[method] = np.square(held - weight).sum(axis=0)
    assert (errors["mse"] <= errors["absmax"] * 1.0001).all()
    assert errors["mse"].sum() < 0.9 * errors["absmax"].sum()


@pytest.mark.parametrize("method", ["absmax", "mse"])
def test_zeros_denormals_and_the_largest_numbers(method):
    weight = np.zeros((4, 4), np.float32)
    weight[1, 1], weight[2, 2], weight[3, 3] = 1e-42, np.finfo(np.float32).max, -np.finfo(np.float32).max
    scales = rounding.scales_of(weight, 8, method=method)
    held = rounding.dequantize(rounding.quantize(weight, scales, 8), scales)
    assert np.isfinite(held).all() and held[1, 1] == 0
    np.testing.assert_allclose(held[2:, 2:], weight[2:, 2:], rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(value):
    weight = _weight()
    weight[3, 2] = value
    with pytest.raises(DataError, match="NaN or infinite"):
        rounding.scales_of(weight, 8)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="groups of 5 do not divide 32"):
        rounding.scales_of(_weight(), 8, group_size=5)
    with pytest.raises(ValueError, match="2 to 16 bits, not 1"):
        rounding.scales_of(_weight(), 1)
    with pytest.raises(ValueError, match="do not fit"):
        rounding.quantize(_weight(), np.ones((3, 6), np.float32), 8)
