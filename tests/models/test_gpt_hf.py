"""Against Hugging Face transformers, by goldens (recipe: tests/goldens/make_hf_goldens.py)."""

import numpy as np
import paddle
import pytest

from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.model import ModelConfig
from ppfleetx.models.gpt.hf import canonical_to_hf, hf_to_canonical, model_keys
from ppfleetx.nn.loss import token_loss
from ppfleetx.nn.stage import canonical_parameters
from tests.models.gpt_builders import assign, build, load_golden

FAMILIES = ["hf_gpt2", "hf_llama"]


def golden_model(name):
    hf_config, arrays = load_golden(name)
    weights = {key.removeprefix("weight/"): value for key, value in arrays.items() if "weight/" in key}
    keys = model_keys(hf_config) | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = build(ModelConfig(**keys))
    canonical = dict(hf_to_canonical(hf_config, weights.__getitem__))
    assert canonical.keys() == canonical_parameters(model).keys()
    for key, value in canonical.items():
        assign(model, key, value)
    return hf_config, arrays, weights, model


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_hugging_face(name):
    _, arrays, _, model = golden_model(name)
    model.eval()
    logits = model(paddle.to_tensor(arrays["tokens"])).transpose([1, 0, 2]).numpy()
    np.testing.assert_allclose(logits[..., :97], arrays["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_equal_hugging_face(name):
    hf_config, arrays, _, model = golden_model(name)
    tokens = paddle.to_tensor(arrays["tokens"])
    mask = paddle.ones([3, 20])
    mask[:, -1] = 0.0
    labels = paddle.concat([tokens[:, 1:], tokens[:, :1]], axis=1)
    loss_sum, count = token_loss(model(tokens), labels, mask, 97)
    (loss_sum / count).backward()
    assert (loss_sum / count).item() == pytest.approx(float(arrays["loss"]), rel=1e-6)
    gradients = {key: p.grad.numpy() for key, p in canonical_parameters(model).items()}
    ours = dict(canonical_to_hf(hf_config, gradients.__getitem__))
    expected = {key.removeprefix("grad/"): value for key, value in arrays.items() if "grad/" in key}
    assert len(expected) >= 3
    for key, value in expected.items():
        np.testing.assert_allclose(ours[key], value, rtol=1e-3, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", FAMILIES)
def test_maps_are_inverse(name):
    hf_config, _, weights, model = golden_model(name)
    padded = {key: p.numpy() for key, p in canonical_parameters(model).items()}
    back = dict(canonical_to_hf(hf_config, padded.__getitem__))
    tied = {"lm_head.weight"} if name == "hf_gpt2" else set()
    assert back.keys() == weights.keys() - tied
    for key, value in back.items():
        np.testing.assert_array_equal(value, weights[key], err_msg=key)


def test_gpt2_names_without_prefix():
    hf_config, _, weights, _ = golden_model("hf_gpt2")
    bare = {key.removeprefix("transformer."): value for key, value in weights.items()}
    for key, value in hf_to_canonical(hf_config, bare.__getitem__):
        np.testing.assert_array_equal(
            value, dict(hf_to_canonical(hf_config, weights.__getitem__))[key], err_msg=key
        )


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "bert"},
        {"activation_function": "tanh"},
        {"scale_attn_by_inverse_layer_idx": True},
    ],
)
def test_unsupported_models_are_refused_in_words(change):
    hf_config, _ = load_golden("hf_gpt2")
    with pytest.raises(CheckpointError, match="not supported"):
        model_keys(hf_config | change)


def test_scaled_rope_is_refused():
    hf_config, _ = load_golden("hf_llama")
    with pytest.raises(CheckpointError, match="rope scaling"):
        model_keys(hf_config | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}})
