"""Hugging Face's mixtures of experts, against transformers in float64 (recipe: tests/goldens/make_hf_moe.py)."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ppfleetx.checkpoint.weights import fitted
from ppfleetx.checkpoint.weights_only import read_ppfleetx
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.convert import Conversion, check_logits, convert
from ppfleetx.conversion.huggingface.config_keys import model_keys, unknown_keys
from ppfleetx.conversion.huggingface.directory import read_hf, write_hf
from ppfleetx.conversion.logits import our_logits

GOLDENS = Path(__file__).parents[1] / "goldens"
NAMES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe")
ALL = pytest.mark.parametrize("name", NAMES)
CLOSE = 1e-5


def golden(name):
    with np.load(GOLDENS / "hf_moe.npz") as stored:
        mine = {
            key.removeprefix(f"{name}/"): stored[key] for key in stored.files if key.startswith(f"{name}/")
        }
    config = json.loads(str(mine["config"]))
    weights = {
        key.removeprefix("w/"): value.astype(np.float32) for key, value in mine.items() if key[:2] == "w/"
    }
    return config, weights, mine


def write(directory, name, change=None, **keys):
    """The golden model as a directory. ``change`` changes its tensors in place, ``keys`` its config.json."""
    config, weights, _ = golden(name)
    if change is not None:
        change(weights)
    directory.mkdir(parents=True)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | keys))
    return directory


@ALL
def test_there_and_back(tmp_path, name):
    config, weights, mine = golden(name)
    source = write(tmp_path / "hf", name)
    there = Conversion("hf", "ppfleetx", source, tmp_path / "ours")
    assert check_logits(there, convert(there)) < CLOSE
    ours = read_ppfleetx(tmp_path / "ours")
    model = ModelConfig(**ours.model)
    logits, seen = our_logits(ours, model, mine["input_ids"]), mine["attention_mask"] == 1
    np.testing.assert_allclose(logits[seen], mine["logits"][seen], rtol=0, atol=CLOSE)

    convert(Conversion("ppfleetx", "hf", tmp_path / "ours", tmp_path / "back"))
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == weights.keys()
    for key, value in found.items():
        np.testing.assert_array_equal(value, weights[key], err_msg=key)
    after = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: after[key] for key in config.keys() - {"dtype"}}.items() <= config.items()

    # What is trained here has no config.json: one is made.
    write_hf(fitted(ours, model), model, tmp_path / "made")
    made = json.loads((tmp_path / "made" / "config.json").read_text())
    assert made["model_type"] == name
    again = read_hf(tmp_path / "made")
    np.testing.assert_array_equal(our_logits(again, ModelConfig(**again.model), mine["input_ids"]), logits)
