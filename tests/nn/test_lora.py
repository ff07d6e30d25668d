"""Adapters beside frozen linears."""

import numpy as np
import paddle
import pytest

from ppfleetx.models.gpt.spec import parameter_shapes, trained_count
from ppfleetx.nn.stage import canonical_parameters
from tests.models.gpt_builders import LLAMA_STYLE, assign, build, random_tokens, tiny_config

VARIANTS = [{}, LLAMA_STYLE]
LORA = {"rank": 3, "alpha": 6.0}


def with_adapters(variant, **lora):
    cfg = tiny_config(**variant, lora={**LORA, **lora})
    return cfg, build(cfg)


def fill(model, seed=0):
    """Give every B distinct values."""
    generator = np.random.default_rng(seed)
    for name, parameter in canonical_parameters(model).items():
        if name.endswith("lora.b"):
            parameter.set_value(generator.normal(0, 0.1, parameter.shape).astype(np.float32))


@pytest.mark.parametrize("variant", VARIANTS, ids=["gpt2", "llama"])
def test_the_model_begins_as_what_it_was(variant):
    _, model = with_adapters(variant)
    plain, tokens = build(tiny_config(**variant)), random_tokens()
    assert np.array_equal(model(tokens).numpy(), plain(tokens).numpy())


@pytest.mark.parametrize("variant", VARIANTS, ids=["gpt2", "llama"])
def test_adapters_are_the_product_added_to_the_weight(variant):
    _, model = with_adapters(variant)
    fill(model)
    plain, tokens = build(tiny_config(**variant)), random_tokens()
    parameters = {name: p.numpy() for name, p in canonical_parameters(model).items()}
    for name, value in parameters.items():
        if name.endswith("lora.a"):
            linear = name.removesuffix(".lora.a")
            product = value @ parameters[f"{linear}.lora.b"]
            assign(plain, f"{linear}.weight", parameters[f"{linear}.weight"] + 6.0 / 3 * product)
    np.testing.assert_allclose(model(tokens).numpy(), plain(tokens).numpy(), rtol=0, atol=1e-5)
    assert np.abs(plain(tokens).numpy() - build(tiny_config(**variant))(tokens).numpy()).max() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS, ids=["gpt2", "llama"])
def test_adapters_alone_get_gradients(variant):
    cfg, model = with_adapters(variant)
    fill(model)
    model.train()
    model(random_tokens()).sum().backward()
    parameters = canonical_parameters(model)
    assert {name for name, p in parameters.items() if p.grad is not None} == {
        name for name in parameters if ".lora." in name
    }
    assert {name: tuple(p.shape) for name, p in parameters.items()} == parameter_shapes(cfg)
    assert trained_count(cfg) == sum(p.size for p in parameters.values() if not p.stop_gradient)


def test_targets_are_chosen_by_pattern():
    _, model = with_adapters({}, targets=["decoder.layers.1.*", "*.qkv"])
    adapted = {n.removesuffix(".lora.a") for n in canonical_parameters(model) if n.endswith("lora.a")}
    second = {f"decoder.layers.1.{n}" for n in ("attention.qkv", "attention.out_proj", "mlp.fc1", "mlp.fc2")}
    assert adapted == {"decoder.layers.0.attention.qkv", *second}


def test_initial_values():
    cfg = tiny_config(hidden_size=256, lora={"rank": 64})
    parameters = canonical_parameters(build(cfg))
    a = parameters["decoder.layers.0.attention.qkv.lora.a"].numpy()
    assert a.std() == pytest.approx(1 / 16, rel=0.02)
    assert not parameters["decoder.layers.0.attention.qkv.lora.b"].numpy().any()


def test_dropout_is_on_the_adapters_input_alone():
    _, model = with_adapters({}, dropout=0.5)
    tokens = random_tokens()
    model.train()
    assert np.array_equal(model(tokens).numpy(), model(tokens).numpy()), "B is 0"
    fill(model)
    paddle.seed(1)
    assert not np.array_equal(model(tokens).numpy(), model(tokens).numpy())
    model.eval()
    assert np.array_equal(model(tokens).numpy(), model(tokens).numpy())
