"""A dense model as a mixture of experts."""

import numpy as np
import pytest

from ppfleetx.checkpoint.model_only import read_ppfleetx
from ppfleetx.commands.checkpoint_verbs import Upcycle
from ppfleetx.config.errors import UserError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.compare_logits import our_logits
from tests.compress.runs import MODELS, write_run

TOKENS = np.arange(24).reshape(2, 12)


def made(place, output, **keys):
    """The mixture that the verb writes: its network and its weights."""
    assert Upcycle(checkpoint=str(place), output=str(output), experts=3, **keys).run() is None  # exit code 0
    weights = read_ppfleetx(output)
    return ModelConfig(**weights.model), weights


@pytest.mark.parametrize("name", MODELS)
def test_a_mixture_begins_with_what_the_dense_model_computes(tmp_path, name):
    dense = read_ppfleetx(write_run(tmp_path / "dense", MODELS[name]))
    expected = our_logits(dense, ModelConfig(**dense.model), TOKENS)
    model, weights = made(tmp_path / "dense", tmp_path / "moe", override=("Model.moe.first_dense_layers=1",))
    assert (model.moe.num_experts, model.moe.top_k, weights.step) == (3, 2, 0)
    assert "decoder.layers.0.mlp.fc1.weight" in weights.tensors
    np.testing.assert_allclose(our_logits(weights, model, TOKENS), expected, rtol=0, atol=1e-5)


def test_noise_tells_experts_apart(tmp_path):
    place = write_run(tmp_path / "dense", MODELS["llama_style"])
    name = "decoder.layers.0.mlp.experts.fc1.weight"
    dense = read_ppfleetx(place).tensors["decoder.layers.0.mlp.fc1.weight"].read()
    _, weights = made(place, tmp_path / "one", noise=0.1, top_k=1)
    experts = weights.tensors[name].read()
    ratio = (experts - dense).std(axis=(1, 2)) / dense.std()
    np.testing.assert_allclose(ratio, 0.1, rtol=0.1)
    assert (experts[0] != experts[1]).any()
    _, again = made(place, tmp_path / "two", noise=0.1, top_k=1)
    np.testing.assert_array_equal(experts, again.tensors[name].read())


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"top_k": 4}, "a position cannot choose 4 of 3 experts"),
        ({"noise": 2.0}, "--noise = 2.0: must be between 0 and 1"),
        ({"override": ("Model.moe.expert_ffn_size=8",)}, "whose inner width is 96"),
        ({"override": ("Model.moe.shared_experts={ffn_size: 8}",)}, "nothing to make shared ones of"),
        ({"override": ("Model.moe.router.normalize=False",)}, "would change what the model computes"),
        ({"override": ("Model.rotary_base=5",)}, "upcycling changes Model.moe alone"),
    ],
)
def test_what_would_not_compute_the_same_is_refused(tmp_path, keys, words):
    place = write_run(tmp_path / "dense", MODELS["llama_style"])
    with pytest.raises(UserError, match=words):
        made(place, tmp_path / "moe", **keys)
    assert not (tmp_path / "moe").exists()


def test_experts_are_not_merged(tmp_path):
    place = write_run(tmp_path / "mixture", {**MODELS["llama_style"], "moe": {"num_experts": 4}})
    with pytest.raises(UserError, match="already a mixture of 4 experts, and their number cannot be changed"):
        made(place, tmp_path / "moe")
