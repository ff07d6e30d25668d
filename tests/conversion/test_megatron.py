"""Megatron-LM's classic checkpoints, made by PyTorch (recipe: tests/goldens/make_torch_goldens.py)."""

import shutil

import numpy as np
import pytest

from ppfleetx.checkpoint.weights import fitted
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.rope import RopeScalingConfig
from ppfleetx.conversion import megatron
from ppfleetx.conversion.convert import model_of
from ppfleetx.conversion.huggingface.config_import import model_keys
from ppfleetx.conversion.megatron import read_megatron
from tests.helpers.hf_weights import hf_to_canonical
from tests.models.gpt_builders import GOLDENS, load_golden

MEGATRON = GOLDENS / "megatron"


def expected(name):
    """Our weights of a golden model by the Hugging Face maps, which are tested on their own."""
    hf_config, arrays = load_golden(name)
    weights = {key.removeprefix("weight/"): value for key, value in arrays.items() if "weight/" in key}
    return hf_config, dict(hf_to_canonical(hf_config, weights.__getitem__))


def check(weights, model, name):
    _, wanted = expected(name)
    tensors = fitted(weights, model)
    assert tensors.keys() == wanted.keys()
    for key, value in wanted.items():
        found = tensors[key].read()
        assert tensors[key].dtype == "F16"
        true = tuple(slice(n) for n in value.shape)
        np.testing.assert_array_equal(found[true], value.astype(np.float16), err_msg=key)


@pytest.mark.parametrize("place", ["", "iter_0000007"])
def test_tensor_and_pipeline_ranks_are_put_together(place):
    weights = read_megatron(MEGATRON / "gpt2_tp2_pp2" / place)
    model = model_of(weights, None)
    assert weights.step == 7
    assert (model.vocab_size, model.hidden_act, model.num_layers) == (97, "gelu", 2)
    check(weights, model, "hf_gpt2")


def test_grouped_keys_swiglu_and_core_names():
    weights = read_megatron(MEGATRON / "llama_tp2" / "iter_0000003")
    model = model_of(weights, None)
    hf_config, _ = expected("hf_llama")
    keys = model_keys(hf_config)
    for key in ("num_query_groups", "rotary_base", "hidden_act", "normalization", "norm_epsilon"):
        assert getattr(model, key) == keys[key]
    check(weights, model, "hf_llama")


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("place", ["", "release", "release/mp_rank_00"])
def test_old_layouts_without_options(version, place):
    hf_config, _ = expected("hf_gpt2")
    model = ModelConfig(**model_keys(hf_config))
    weights = read_megatron(MEGATRON / f"gpt2_v{version}" / place, model)
    check(weights, model_of(weights, model), "hf_gpt2")
    with pytest.raises(CheckpointError, match="--config"):
        read_megatron(MEGATRON / f"gpt2_v{version}")


def test_missing_ranks_and_other_formats_are_said(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(MEGATRON / "gpt2_tp2_pp2", run)
    shutil.rmtree(run / "iter_0000007" / "mp_rank_00_001")
    with pytest.raises(CheckpointError, match="tensor rank 0, pipeline rank 1"):
        read_megatron(run)
    (run / "latest_checkpointed_iteration.txt").write_text("9")
    with pytest.raises(CheckpointError, match="names '9'"):
        read_megatron(run)
    (tmp_path / "distributed").mkdir()
    (tmp_path / "distributed" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match="distcp"):
        read_megatron(tmp_path / "distributed")


def give(monkeypatch, options):
    """Let checkpoints have these options beside their own."""
    real = megatron._load

    def load(path):
        tree = real(path)
        tree["args"].state |= options
        return tree

    monkeypatch.setattr(megatron, "_load", load)


def test_a_given_network_that_contradicts_the_options_is_refused():
    weights = read_megatron(MEGATRON / "llama_tp2" / "iter_0000003")
    model = model_of(weights, None)
    with pytest.raises(CheckpointError, match="rotary_base"):
        model_of(weights, model.model_copy(update={"rotary_base": 5e5}))


@pytest.mark.parametrize(
    "options, scaling",
    [
        ({}, None),
        ({"rotary_seq_len_interpolation_factor": 4}, {"type": "linear", "factor": 4.0}),
        ({"use_rope_scaling": True}, {"type": "llama3", "factor": 8.0}),
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0}, {"type": "llama3", "factor": 32.0}),
    ],
)
def test_scaled_rotary_positions(monkeypatch, options, scaling):
    """Linear interpolation, and Llama 3's with the constants that Megatron has in its code."""
    give(monkeypatch, options)
    weights = read_megatron(MEGATRON / "llama_tp2" / "iter_0000003")
    found = model_of(weights, None).rope_scaling
    if scaling is not None and scaling["type"] == "llama3":
        assert found.original_max_position_embeddings == 8192
        assert (found.low_freq_factor, found.high_freq_factor) == (1.0, 4.0)
    assert (None if found is None else {"type": found.type, "factor": found.factor}) == scaling
    other = RopeScalingConfig(type="linear", factor=3)
    with pytest.raises(CheckpointError, match="rope_scaling"):
        model_of(weights, model_of(weights, None).model_copy(update={"rope_scaling": other}))


def test_a_part_of_each_head_may_be_turned(monkeypatch):
    give(monkeypatch, {"rotary_percent": 0.5})
    assert model_of(read_megatron(MEGATRON / "llama_tp2" / "iter_0000003"), None).rotary_percent == 0.5


@pytest.mark.parametrize(
    "place, golden, options, kind",
    [
        ("gpt2_tp2_pp2", "hf_gpt2", {"apply_layernorm_1p": True}, "LayerNorm1P"),
        ("llama_tp2/iter_0000003", "hf_llama", {"layernorm_zero_centered_gamma": True}, "RMSNorm1P"),
        ("llama_tp2/iter_0000003", "hf_llama", {"apply_layernorm_1p": False}, "RMSNorm"),
    ],
)
def test_gains_around_zero_are_taken_as_they_are(monkeypatch, place, golden, options, kind):
    give(monkeypatch, options)
    weights = read_megatron(MEGATRON / place)
    model = model_of(weights, None)
    assert model.normalization == kind
    check(weights, model, golden)
    other = kind.removesuffix("1P") if kind.endswith("1P") else f"{kind}1P"
    with pytest.raises(CheckpointError, match="normalization"):
        model_of(weights, model.model_copy(update={"normalization": other}))
