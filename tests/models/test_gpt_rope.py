"""Rotary positions and their scaling against transformers (goldens: tests/goldens/make_hf_rope.py)."""

import json
from functools import cache

import numpy as np
import paddle
import pytest

from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.rope import RopeScalingConfig
from ppfleetx.conversion.huggingface.config_export import describes, hf_config
from ppfleetx.conversion.huggingface.config_import import model_keys
from ppfleetx.conversion.huggingface.rope import hf_rope, rope_keys, rope_notes
from ppfleetx.nn.positions import RotaryEmbedding
from ppfleetx.nn.rope_scaling import attention_factor, inverse_frequencies
from tests.helpers.hf_weights import hf_to_canonical
from tests.models.gpt_builders import GOLDENS, assign, build, load_golden, logits_of, tiny_config

NO_SCALING = {
    "plain",
    "theta at the top",
    "theta inside",
    "theta twice",
    "no theta",
    "both, the other way round",
}


@cache
def golden():
    with np.load(GOLDENS / "hf_rope.npz") as archive:
        arrays = {key: archive[key] for key in archive.files}
    base, _ = load_golden("hf_llama")
    cases = {
        name: {key: value for key, value in (base | changes).items() if value != "absent"}
        for name, changes in json.loads(str(arrays.pop("cases"))).items()
    }
    return cases, arrays


def cases():
    return sorted(golden()[0])


@pytest.mark.parametrize("name", cases())
def test_frequencies_of_a_config_json_are_those_of_transformers(name):
    config = golden()[0][name]
    model = ModelConfig(**model_keys(config))
    assert (model.rope_scaling is None) == (name in NO_SCALING)
    frequencies = inverse_frequencies(model.head_size, model.rotary_base, model.rope_scaling)
    np.testing.assert_allclose(frequencies, golden()[1][f"frequencies/{name}"], rtol=2e-6)
    assert attention_factor(model.rope_scaling) == pytest.approx(
        float(golden()[1][f"factor/{name}"]), rel=1e-6
    )


@pytest.mark.parametrize("name", cases())
def test_what_is_written_for_transformers_means_the_same(name):
    config = golden()[0][name]
    model = ModelConfig(**model_keys(config))
    assert rope_keys(hf_rope(model)) == rope_keys(config)
    assert describes(config, model)
    assert describes(hf_config(model, "F32"), model)
    kept = hf_config(model, "F32", original=config)
    assert {key: kept[key] for key in config.keys() - {"dtype"}} == {
        k: v for k, v in config.items() if k != "dtype"
    }
    if model.rope_scaling is not None:
        assert not describes(config, model.model_copy(update={"rope_scaling": None}))


@pytest.mark.parametrize("name", [name for name in cases() if name.startswith("short ")])
def test_logits_beyond_the_original_length_equal_transformers(name):
    config, (_, arrays) = golden()[0][name], load_golden("hf_llama")
    weights = {key.removeprefix("weight/"): value for key, value in arrays.items() if "weight/" in key}
    tokens, expected = golden()[1]["tokens"], golden()[1][f"logits/{name}"]
    assert tokens.shape[1] >= rope_keys(config)["rope_scaling"].get("original_max_position_embeddings", 0)

    def difference(**keys):
        model = build(ModelConfig(**(model_keys(config) | keys)))
        for key, value in hf_to_canonical(config, weights.__getitem__):
            assign(model, key, value)
        model.eval()
        return np.abs(logits_of(model, paddle.to_tensor(tokens))[:, ::5, :97] - expected).max()

    assert difference() < 1e-4
    assert difference(rope_scaling=None) > 0.1, "the golden is no plain Llama's"


def test_each_row_has_the_angles_of_its_own_length():
    """In transformers the longest row decides for the whole batch."""
    config, rng = golden()[0]["short longrope"], np.random.default_rng(0)
    model = build(ModelConfig(**model_keys(config)))
    model.eval()
    tokens = rng.integers(0, 97, (2, 40))
    positions = np.stack([np.arange(40), np.arange(40) % 16])  # the second row: packed documents
    together = model(*map(paddle.to_tensor, (tokens, positions))).numpy()
    for row in (0, 1):
        alone = model(*(paddle.to_tensor(one[row : row + 1]) for one in (tokens, positions))).numpy()
        np.testing.assert_allclose(together[:, row], alone[:, 0], rtol=0, atol=1e-5)
    short = model(*(paddle.to_tensor(one[:1, :16]) for one in (tokens, positions))).numpy()
    assert np.abs(together[:16, 0] - short[:, 0]).max() > 1e-3, "the same tokens, in a long row"


def test_a_program_computes_the_angles_of_the_tables():
    """Exported programs have no tables; tests/deploy tests a whole program."""
    scaling = RopeScalingConfig(type="yarn", factor=4, original_max_position_embeddings=16)
    rotary = RotaryEmbedding(8, 64, 100.0, scaling)
    positions = paddle.arange(64).unsqueeze(0)
    tables = [table.numpy() for table in rotary.cos_sin(positions)]

    def cos_sin(position_ids):
        return rotary.cos_sin(position_ids)

    spec = paddle.static.InputSpec([1, None], "int64")
    traced = paddle.jit.to_static(cos_sin, input_spec=[spec], full_graph=True)
    for table, computed in zip(tables, traced(positions), strict=True):
        np.testing.assert_allclose(computed.numpy(), table, rtol=0, atol=2e-7)
    assert np.abs(tables[0]).max() == pytest.approx(0.1 * np.log(4) + 1)


LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rope_scaling": "linear"}, "rope_scaling = .linear."),
        ({"rope_scaling": {"type": "longrope", "factor": 2, "long_factor": [2] * 4}}, "short_factor"),
        ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "supported: default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor = 0.5.*at least 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "factor = 'x'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        ({"rope_scaling": LLAMA3}, "high_freq_factor must be the greater"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "mrope_section": [1]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_fac"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": None}}, "rope_theta"),
    ],
)
def test_what_is_not_there_is_refused_in_words(settings, words):
    base, _ = load_golden("hf_llama")
    with pytest.raises(CheckpointError, match=words):
        model_keys(base | settings)


def test_a_factor_of_yarn_that_is_not_the_ratio_of_lengths_is_noted():
    noted = {name for name, config in golden()[0].items() if rope_notes(config)}
    assert "yarn" in noted and not noted & {"plain", "linear", "llama3", "short yarn"}


YARN = {"type": "yarn", "factor": 2, "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"type": "dynamic", "factor": 2}, "length of the sequence"),
        ({"type": "longrope", "factor": 2}, "type longrope needs it"),
        ({"type": "linear", "factor": 2, "short_factor": [1.0]}, "belongs to longrope"),
        ({"type": "yarn", "factor": 2}, "type yarn needs it"),
        ({"type": "linear", "factor": 2, "beta_fast": 4}, "belongs to yarn"),
        ({**YARN, "mscale": 1.0}, "given together"),
    ],
)
def test_sections_that_fit_no_type_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        RopeScalingConfig(**values)


def test_sections_of_one_function_are_equal():
    short = RopeScalingConfig(**YARN)
    long = RopeScalingConfig(**YARN, beta_fast=32, beta_slow=1, truncate=True)
    assert short == long and hash(short) == hash(long)
    assert repr(short).startswith('{type: "yarn", factor: 2.0,')


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"position_embedding_type": "rope"}, "one number for each of the 4 frequencies, and has 2"),
        ({}, "rope_scaling"),
    ],
)
def test_sections_that_fit_no_model_are_refused(keys, words):
    factors = {"short_factor": [1.0, 1.0], "long_factor": [1.0, 2.0, 3.0, 4.0]}
    scaling = RopeScalingConfig(**{**YARN, "type": "longrope"}, **factors)
    with pytest.raises(ValueError, match=words):
        tiny_config(hidden_size=8, num_attention_heads=1, rope_scaling=scaling, **keys)
