"""Hugging Face directories that are damaged or lie are refused in a sentence naming file, key, rule."""

import json

import pytest
from safetensors.numpy import load_file, save_file

from ppfleetx.config.errors import CheckpointError
from ppfleetx.conversion.huggingface.directory import read_hf
from tests.conversion import hf_dirs

# (golden model, changed keys of its config.json, what the message names)
ODD_VALUES = [
    *(("hf_gpt2", {"n_embd": value}, "n_embd = ") for value in ("8", 8.5, 0, True, 10**30)),
    ("hf_gpt2", {"n_head": 7, "n_embd": 60}, "7 heads"),
    ("hf_gpt2", {"n_layer": 9000}, "9000 layers, but the files have 28 tensors"),
    (
        "hf_gpt2",
        {"n_layer": 10**9},
        "n_layer = 1000000000 in config.json: must be an integer from 1 to 10000",
    ),
    ("hf_gpt2", {"n_embd": 200_000}, r"wte.weight has shape .*\[97, 200000\]"),
    ("hf_gpt2", {"layer_norm_epsilon": 0}, "layer_norm_epsilon = 0"),
    ("hf_gpt2", {"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
    ("hf_gpt2", {"scale_attn_weights": [1]}, "scale_attn_weights: "),
    ("hf_gpt2", {"model_type": ["gpt2"]}, "model_type .* is not supported"),
    ("hf_llama", {"rope_parameters": 5}, "rope_parameters = 5 must be a mapping"),
    ("hf_llama", {"rope_parameters": {"rope_theta": -1}}, "rotary_base = -1"),
    ("hf_llama", {"num_key_value_heads": 4}, "num_query_groups = 4"),
    ("hf_llama", {"head_dim": -4}, "head_dim = -4"),
]


@pytest.mark.parametrize("name, changes, words", ODD_VALUES)
def test_odd_values_of_config_json(tmp_path, name, changes, words):
    directory = hf_dirs.write(tmp_path / "hf", name, **changes)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_hf(directory)
    assert str(directory) in str(caught.value)


def test_missing_keys_of_config_json(tmp_path):
    directory = hf_dirs.write(tmp_path / "hf", "hf_gpt2")
    whole = json.loads((directory / "config.json").read_text())
    for key, words in (("n_layer", "config.json lacks n_layer"), ("model_type", "model_type None")):
        (directory / "config.json").write_text(json.dumps({k: v for k, v in whole.items() if k != key}))
        with pytest.raises(CheckpointError, match=words):
            read_hf(directory)


def test_an_index_that_lies(tmp_path):
    directory = hf_dirs.write(tmp_path / "hf", "hf_gpt2", shards=3)
    index = directory / "model.safetensors.index.json"
    sound = json.loads(index.read_text())
    where = sound["weight_map"]
    first, *_ = where
    for wrong, words in (
        ({"weight_map": []}, "has no weight_map"),
        ({"weight_map": where | {first: 5}}, "has no weight_map"),
        ({"weight_map": where | {first: "../x.safetensors"}}, "which is not a file beside it"),
        ({"weight_map": where | {first: ".."}}, "Is a directory"),
        ({"weight_map": where | {"no.such": where[first]}}, "lists 'no.such', which is not in"),
    ):
        index.write_text(json.dumps(sound | wrong))
        with pytest.raises(CheckpointError, match=words):
            read_hf(directory)
    index.write_text(json.dumps(sound))
    read_hf(directory)

    second = directory / "model-00002-of-00003.safetensors"
    kept = load_file(second)
    save_file(kept | load_file(directory / "model-00001-of-00003.safetensors"), second)
    with pytest.raises(CheckpointError, match=r"which another file holds too"):
        read_hf(directory)
    second.unlink()
    words = r"index\.json names 'model-00002-of-00003\.safetensors', which is missing beside it"
    with pytest.raises(CheckpointError, match=words):
        read_hf(directory)
