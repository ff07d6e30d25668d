"""Weights that were trained with quantisation are stored as training rounded them."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from ppfleetx.compress.rounding import on_trained_grid
from ppfleetx.config.sections.compress import Form, QuantizationConfig
from ppfleetx.nn.fake_quant import FakeQuantizer

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
