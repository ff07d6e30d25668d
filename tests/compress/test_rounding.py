"""Grids of numbers: ends, errors, groups, gradients, and what has no place on them."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from ppfleetx.compress import rounding
from ppfleetx.compress.rounding import on_trained_grid
from ppfleetx.config.errors import DataError
from ppfleetx.config.sections.compress import Form, QuantizationConfig
from ppfleetx.nn.fake_quant import FakeQuantizer


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


# -- weights that were trained with quantization are stored as training rounded them ---------------


LINEAR = "decoder.layers.3.mlp.fc2"


@pytest.mark.parametrize("kind", ["abs_max", "channel_wise_abs_max"])
@pytest.mark.parametrize(("bits", "share"), [(8, None), (4, None), (8, 0.7)])
def test_what_is_stored_is_what_training_computed_with(kind, bits, share):
    weight = np.random.default_rng(0).normal(size=(32, 24)).astype(np.float32)
    more = {} if share is None else {"weight_preprocess_type": "PACT"}
    cfg = QuantizationConfig(enable=True, weight_bits=bits, weight_quantize_type=kind, **more)
    clips = {} if share is None else {f"{LINEAR}.quant.weight_clip": np.array([share], np.float32)}
    checkpoint = SimpleNamespace(names=lambda: list(clips), read=clips.__getitem__)
    quantizer = FakeQuantizer(cfg)
    if share is not None:
        quantizer.weight_clip.set_value(clips[f"{LINEAR}.quant.weight_clip"])
    expected = quantizer.weight(paddle.to_tensor(weight)).numpy()
    for form in (Form(8), Form(4, group_size=8)):
        stored = on_trained_grid(weight, LINEAR, form, cfg, checkpoint)
        if form.bits < bits:
            assert stored is None
            continue
        assert stored.scale.shape == (4 if form.group_size else 1, 24)
        np.testing.assert_allclose(stored.values(), expected, rtol=1e-6, atol=0)


def test_what_training_did_not_round_has_no_such_grid():
    cfg = QuantizationConfig(enable=True, skip_layers=("*.mlp.fc2",))
    assert on_trained_grid(np.ones((4, 4), np.float32), LINEAR, Form(8), cfg, None) is None


# -- grids of 4 bits with offsets --------------------------------------------------------------------


def _off_center(rows=64, columns=40, seed=2):
    """Each group of 16 has a mean that is not 0."""
    rng = np.random.default_rng(seed)
    means = np.repeat(rng.normal(0, 0.5, (rows // 16, columns)), 16, axis=0)
    return (rng.standard_normal((rows, columns)) + means).astype(np.float32)


@pytest.mark.parametrize("make", [_weight, _off_center])
def test_offsets_lessen_the_error_in_as_many_bytes(make):
    weight = make(64, 40)
    symmetric, asymmetric = (rounding.nearest(weight, Form(4, 16, asymmetric=has)) for has in (False, True))
    assert symmetric.num_bytes == asymmetric.num_bytes
    errors = [rounding.weight_error(weight, one.values()) for one in (symmetric, asymmetric)]
    assert errors[1] < 0.9 * errors[0], errors
    half = rounding.nearest(weight, Form(4, 32, asymmetric=True))
    assert half.num_bytes < symmetric.num_bytes
    assert rounding.weight_error(weight, half.values()) < errors[0]


def test_weights_of_a_q4_1_file_stay_as_they_are():
    """Groups of 32 with 16 levels from a minimum on, both in 16 bits."""
    rng = np.random.default_rng(4)
    levels = rng.integers(0, 16, (4, 32, 20)).astype(np.float32)
    levels[:, 0], levels[:, 1] = 0, 15  # as every group of such a file has them
    scale = rng.uniform(2e-3, 2e-2, (4, 1, 20)).astype(np.float16).astype(np.float32)
    lowest = (-scale * rng.uniform(5, 10, (4, 1, 20))).astype(np.float16).astype(np.float32)
    weight = (levels * scale + lowest).reshape(128, 20)
    stored, of_8_bits = (rounding.nearest(weight, Form(bits, 32, asymmetric=True)) for bits in (4, 8))
    np.testing.assert_array_equal(stored.levels.reshape(4, 32, 20), levels - 8)
    is_that_grid = of_8_bits.levels.reshape(4, 32, 20) == levels * 17 - 128
    assert is_that_grid.mean() > 0.9  # others fit a few groups better
    assert all(rounding.weight_error(weight, one.values()) < 3e-4 for one in (stored, of_8_bits))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sign", [1, -1])
def test_weights_of_a_q4_0_or_q8_0_file_stay_as_they_are(bits, sign):
    """Groups of 32 with one scale in 16 bits: the largest magnitude is at level -8, or at +-127."""
    rng = np.random.default_rng(4)
    levels = rng.integers(-4, 5, (4, 32, 20)).astype(np.float32)
    levels[:, 3] = -8 if bits == 4 else 127
    scale = sign * rng.uniform(1e-4, 1e-2, (4, 1, 20)).astype(np.float16).astype(np.float32)
    weight = (levels * scale).reshape(128, 20)
    stored = rounding.nearest(weight, Form(bits, 32, asymmetric=True))
    np.testing.assert_array_equal(stored.values(), weight)


def test_zeros_equal_values_and_the_largest_numbers_on_a_grid_with_offsets():
    weight = np.zeros((16, 4), np.float32)
    weight[:, 1], weight[3, 2], weight[0, 3], weight[1, 3] = 0.5, 1e-9, 65504, -65504
    held = rounding.nearest(weight, Form(4, 16, asymmetric=True)).values()
    finer = rounding.nearest(weight, Form(8, 16, asymmetric=True)).values()
    for column, most in enumerate((0, 1e-6, 1e-6, 600)):
        np.testing.assert_allclose(finer[:, column], weight[:, column], rtol=0, atol=most)
    np.testing.assert_allclose(held[:, :3], weight[:, :3], atol=1e-6)
    np.testing.assert_allclose(held[:2, 3], weight[:2, 3], rtol=0.1)
    weight[2, 2] = 70000
    with pytest.raises(DataError, match="beyond 65,504"):
        rounding.nearest(weight, Form(4, 16, asymmetric=True))


@pytest.mark.parametrize("asymmetric", [False, True])
def test_gptq_lessens_the_error_of_products(asymmetric):
    weight, form = _off_center(), Form(4, 16, asymmetric=asymmetric)
    inputs = np.random.default_rng(5).standard_normal((200, 64)) @ np.random.default_rng(6).random((64, 64))
    hessian = inputs.T @ inputs
    stored = [rounding.nearest(weight, form), rounding.gptq(weight, hessian, form)]
    errors = [rounding.output_error(weight, one.values(), hessian) for one in stored]
    assert errors[1] < 0.8 * errors[0], errors
