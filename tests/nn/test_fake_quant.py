"""Fake quantization of linears: values, gradients, scales over steps, choice of layers."""

import numpy as np
import paddle
import pytest

from ppfleetx.compress import rounding
from ppfleetx.config.sections.compress import QuantizationConfig, is_of_quantizer
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn.fake_quant import (
    FakeQuantizer,
    on_grid,
    on_learned_grid,
    quantizers_of,
    with_quantizers,
)
from ppfleetx.nn.layer_factory import InferenceFactory, LocalFactory
from ppfleetx.nn.stage import canonical_parameters
from ppfleetx.optims.gradients import is_in_use
from tests.models.gpt_builders import random_tokens, tiny_config

CHANNELS = {"weight_quantize_type": "channel_wise_abs_max", "activation_quantize_type": "abs_max"}


def config(**keys):
    return QuantizationConfig(enable=True, **keys)


def build(factory=None, follows=True, network=None, **keys):
    factory = factory or LocalFactory()
    stages = gpt_stages(tiny_config(initializer_range=0.2, **(network or {})), factory)
    return StagedModel(with_quantizers(stages, config(**keys), factory, follows=follows), seed=1)


def step(model, tokens):
    """Run a forward pass and end the step, as the runner does."""
    model.train()
    for quantizer in quantizers_of(model):
        quantizer.begin()
    logits = model(tokens)
    for quantizer in quantizers_of(model):
        if quantizer.input_scale is not None:
            quantizer.follow(quantizer.take_largest())
    return logits


@pytest.mark.parametrize("bits", [2, 5, 8, 16])
@pytest.mark.parametrize("per_channel", [True, False])
def test_weights_are_rounded_to_the_grid_that_quantising_them_gives(bits, per_channel):
    weight = np.random.default_rng(bits).normal(size=(24, 16)).astype(np.float32)
    weight[:, 3] = 0.0
    kind = "channel_wise_abs_max" if per_channel else "abs_max"
    quantizer = FakeQuantizer(config(weight_bits=bits, weight_quantize_type=kind))
    rounded = quantizer.weight(paddle.to_tensor(weight)).numpy()
    scales = rounding.scales_of(weight, bits, per_tensor=not per_channel)
    expected = rounding.dequantize(rounding.quantize(weight, scales, bits), scales)
    np.testing.assert_allclose(rounded, expected, rtol=1e-6, atol=0)
    assert len(np.unique(np.round(rounded / scales))) <= 2**bits - 1


def test_gradients_pass_inside_the_bound_and_end_beyond_it():
    x = paddle.to_tensor([-3.0, -0.4, 0.0, 0.26, 1.0, 2.5], stop_gradient=False)
    y = on_grid(x, paddle.to_tensor(1.0), 3)
    np.testing.assert_allclose(y.numpy(), [-1, -1 / 3, 0, 1 / 3, 1, 1], rtol=1e-6)
    (y * paddle.arange(1.0, 7.0)).sum().backward()
    assert x.grad.tolist() == [0, 2, 3, 4, 5, 0]


def test_a_learned_bound_learns_from_what_it_cuts_off():
    x = paddle.to_tensor([-3.0, -0.4, 0.3, 2.5], stop_gradient=False)
    share = paddle.to_tensor([0.5], stop_gradient=False)
    y = on_learned_grid(x, paddle.to_tensor(2.0), share, 8)
    assert y.numpy()[[0, 3]].tolist() == [-1.0, 1.0]
    (y * paddle.to_tensor([1.0, 10.0, 100.0, 5.0])).sum().backward()
    assert x.grad.tolist() == [0, 10, 100, 0]
    assert share.grad.tolist() == [2.0 * (5.0 - 1.0)]


def test_the_scale_follows_the_largest_of_each_step():
    model, (a, b) = build(moving_rate=0.75), (random_tokens(), random_tokens(length=20))
    plain = StagedModel(gpt_stages(tiny_config(initializer_range=0.2), LocalFactory()), seed=1)
    scale = quantizers_of(model)[0].input_scale
    assert scale.item() == 0
    seen = []
    plain.stages[1].attention.qkv.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    for tokens in (a, b):
        plain.train()
        plain(tokens)
    first, second = (float(given.abs().max().item()) for given in seen)
    step(model, a)
    assert scale.item() == first
    step(model, b)
    assert scale.item() == pytest.approx(0.75 * first + 0.25 * second, rel=1e-6)
    before = scale.item()
    model.eval()
    model(a)
    assert quantizers_of(model)[0].take_largest().item() == 0, "evaluation moves no scale"
    assert scale.item() == before


def test_a_bound_of_inputs_has_a_gradient_once_there_is_a_scale():
    """Before that, all ranks leave it out, because a gradient of zeros would change the optimizer's
    moments."""
    model = build(activation_preprocess_type="PACT")
    clips = [quantizer.input_clip for quantizer in quantizers_of(model)]
    for has_scale in (False, True):
        step(model, random_tokens()).sum().backward()
        assert {is_in_use(clip) for clip in clips} == {has_scale}
        assert {clip.grad is not None for clip in clips} == {has_scale}


def test_micro_batches_and_recomputation_change_no_scale():
    whole, cut = build(), build()
    tokens = random_tokens(batch=4)
    step(whole, tokens)
    cut.train()
    for part in (*tokens.split(4), tokens[:1]):
        cut(part)
    for one, other in zip(quantizers_of(whole), quantizers_of(cut), strict=True):
        other.follow(other.take_largest())
        # The batch decides the order of sums in matrix products.
        assert other.input_scale.item() == pytest.approx(one.input_scale.item(), rel=1e-5)


def test_what_is_quantized():
    def names(**keys):
        found = canonical_parameters(build(**keys))
        return sorted(name.partition(".quant.")[0] for name in found if is_of_quantizer(name))

    linears = [f"decoder.layers.{i}.{n}" for i in (0, 1) for n in ("attention.out_proj", "attention.qkv")]
    linears += [f"decoder.layers.{i}.mlp.{n}" for i in (0, 1) for n in ("fc1", "fc2")]
    assert names() == sorted(linears)
    columns = [name for name in linears if name.endswith(("qkv", "fc1"))]
    assert names(quantizable_layer_type=("ColumnParallelLinear",)) == sorted(columns)
    assert names(skip_tensor_map={"block_1": ("linear2",)}) == sorted({*linears} - {linears[-1]})
    assert names(skip_layers=("*.layers.0.*",)) == sorted(name for name in linears if ".1." in name)
    assert names(activation_quantize_type="abs_max") == []


@pytest.mark.parametrize("keys", [{}, CHANNELS, {**CHANNELS, "weight_preprocess_type": "PACT"}])
def test_inference_rounds_each_weight_once_and_to_the_same_numbers(keys):
    model, tokens = build(**keys), random_tokens()
    step(model, tokens)
    factory = InferenceFactory()
    factory.keeps_weights = True
    frozen = build(factory, **keys)
    for name, parameter in canonical_parameters(frozen).items():
        parameter.set_value(canonical_parameters(model)[name])
    model.eval(), frozen.eval()
    with paddle.no_grad():
        expected = model(tokens).numpy()
        for _ in range(2):
            # Products are summed in another order, which may take an input to the next point of its grid.
            assert np.abs(frozen(tokens).numpy() - expected).mean() < 1e-3
        assert all(quantizer._kept is not None for quantizer in quantizers_of(frozen))
        linear, same = model.stages[1].mlp.fc1, frozen.stages[1].mlp.fc1
        assert np.array_equal(same.quant._kept.numpy(), linear.quant.weight(linear.weight).numpy())
    plain = StagedModel(gpt_stages(tiny_config(initializer_range=0.2), LocalFactory()), seed=1)
    assert np.abs(plain(tokens).numpy() - expected).mean() > 5e-3, "nothing was rounded"


def test_fewer_bits_err_more():
    tokens, errors = random_tokens(), []
    plain = StagedModel(gpt_stages(tiny_config(initializer_range=0.2), LocalFactory()), seed=1)(tokens)
    for bits in (4, 8, 16):
        model = build(weight_bits=bits, activation_bits=bits, **CHANNELS)
        errors.append(float((model(tokens) - plain).abs().mean().item()))
    assert errors[0] > 8 * errors[1] > 64 * errors[2] > 0


@pytest.mark.parametrize("recompute", [False, True])
def test_a_frozen_embedding_stays_and_blocks_learn(recompute):
    """In every step, with the gradients and scales that they have beside an embedding that learns."""
    keys = {"use_recompute": True, "recompute_granularity": "full"} if recompute else {}
    frozen, free = (build(network=keys, freeze_embedding=freezes) for freezes in (True, False))
    for _ in range(2):  # in the first step, inputs are not rounded yet
        for model in (frozen, free):
            model.clear_gradients()
            step(model, random_tokens()).square().sum().backward()
        expected = {name: p.grad for name, p in canonical_parameters(free).items() if p.grad is not None}
        found = {name: p.grad for name, p in canonical_parameters(frozen).items() if p.grad is not None}
        assert not any("embedding" in name or is_of_quantizer(name) for name in found)
        assert found.keys() == {name for name in expected if "embedding" not in name}
        for name, gradient in found.items():
            np.testing.assert_array_equal(gradient.numpy(), expected[name].numpy(), err_msg=name)
    scales = [[one.input_scale.item() for one in quantizers_of(model)] for model in (frozen, free)]
    assert scales[0] == scales[1] and min(scales[0]) > 0
