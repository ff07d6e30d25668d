"""Mixtures of experts, against transformers in float64 (recipe: tests/goldens/make_hf_moe.py)."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.convert import Conversion, convert
from ppfleetx.conversion.huggingface.config_export import hf_config
from ppfleetx.conversion.huggingface.config_import import model_keys
from ppfleetx.conversion.huggingface.directory import read_hf
from tests.conversion import hf_dirs
from tests.models.gpt_builders import LLAMA_STYLE, tiny_config

GOLDENS = Path(__file__).parents[1] / "goldens"
NAMES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "deepseek_v3")
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
    _, _, mine = golden(name)
    source, seen = write(tmp_path / "hf", name), mine["attention_mask"] == 1
    made = hf_dirs.there_and_back(source, tmp_path, mine["input_ids"], mine["logits"], close=CLOSE, seen=seen)
    assert made["model_type"] == name


def drop(name):
    return lambda weights: weights.pop(name)


def add(name, like):
    return lambda weights: weights.update({name: weights[like]})


EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"


@pytest.mark.parametrize(
    "change, words",
    [
        (drop(EXPERT.format(3)), f"lacks the tensor {EXPERT.format(3)}"),
        (add(EXPERT.format(8), EXPERT.format(0)), f"does not have: {EXPERT.format(8)}"),
        (drop("model.layers.1.mlp.gate.weight"), r"lacks the tensor model.layers.1.mlp.gate.weight"),
        (
            lambda weights: weights.update({EXPERT.format(2): weights[EXPERT.format(2)][:, 1:]}),
            f"{EXPERT.format(2)} has shape .16, 31.,.* .16, 32.",
        ),
    ],
)
def test_experts_that_do_not_fit_are_named(tmp_path, change, words):
    source = write(tmp_path / "hf", "qwen3_moe", change)
    with pytest.raises(CheckpointError, match=words):
        convert(Conversion("hf", "ppfleetx", source, tmp_path / "ours"))
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    "name, keys, words",
    [
        ("qwen3_moe", {"num_local_experts": 2}, "cannot choose 3 of 2 experts"),
        ("qwen3_moe", {"num_experts": 4}, r"num_local_experts \(8\) and num_experts \(4\) are the same key"),
        ("qwen3_moe", {"num_experts_per_tok": "all"}, "num_experts_per_tok = 'all'"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("glm4_moe", {"n_group": 3}, "8 experts do not divide into 3 groups"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "must be the number of attention heads, 4"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("mixtral", {"routed_scaling_factor": 2.5}, "routed_scaling_factor: 2.5 of this mixtral"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act"),
        ("mixtral", {"model_type": "gpt_oss"}, "each of its attention heads has a sink"),
    ],
)
def test_what_is_another_network_is_refused(tmp_path, name, keys, words):
    source = write(tmp_path / "hf", name, **keys)
    with pytest.raises(CheckpointError, match=words):
        read_hf(source)


@pytest.mark.parametrize(
    "keys, layers",
    [
        ({"decoder_sparse_step": 1}, (0, 1, 2)),
        ({"decoder_sparse_step": 2}, (1,)),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0]}, (1, 2)),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [1]}, (0, 2)),
    ],
)
def test_which_layers_are_mixtures(keys, layers):
    config, *_ = golden("qwen3_moe")
    assert ModelConfig(**model_keys(config | keys)).moe.mixture_layers(3) == layers


def test_a_deepseek_v3_without_the_keys_has_transformers_defaults():
    config = golden("deepseek_v3")[0] | {"num_hidden_layers": 5}
    for key in ("routed_scaling_factor", "first_k_dense_replace"):
        del config[key]
    moe = ModelConfig(**model_keys(config)).moe
    assert (moe.router.scale, moe.mixture_layers(5)) == (2.5, (3, 4))


def test_transformers_balances_where_router_logits_are_put_out():
    config, *_ = golden("mixtral")
    assert model_keys(config)["moe"]["aux_loss"] == {"kind": "pooled", "weight": 0.02}
    assert model_keys(config | {"output_router_logits": False})["moe"]["aux_loss"]["kind"] == "none"


def test_layers_that_predict_several_tokens_are_left_out(tmp_path):
    def further(weights):
        weights["model.layers.2.eh_proj.weight"] = weights["model.layers.2.mlp.gate.weight"] = np.zeros(
            (2, 2)
        )

    source = write(tmp_path / "hf", "glm4_moe", further, num_nextn_predict_layers=1)
    assert "num_nextn_predict_layers" in " ".join(read_hf(source).notes)
    convert(Conversion("hf", "hf", source, tmp_path / "back"))
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == golden("glm4_moe")[1].keys()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    with pytest.raises(CheckpointError, match=r"does not have: model\.layers\.2\."):
        read_hf(write(tmp_path / "other", "glm4_moe", further, num_nextn_predict_layers=0))


def test_the_bias_of_a_router_stays_float32(tmp_path):
    """Its steps are lost in 16 bits, and transformers keeps it so too."""
    source = write(tmp_path / "hf", "glm4_moe")
    convert(Conversion("hf", "ppfleetx", source, tmp_path / "ours", dtype="bfloat16"))
    convert(Conversion("ppfleetx", "hf", tmp_path / "ours", tmp_path / "back"))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    with safe_open(tmp_path / "back" / "model.safetensors", "numpy") as found:
        types = {name: found.get_slice(name).get_dtype() for name in found.keys()}  # noqa: SIM118
    assert types.pop(bias) == "F32" and set(types.values()) == {"BF16"}
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_loss_and_gradients_equal_transformers(name):
    """Of routers and an expert, in the models without a balancing loss in transformers."""
    config, weights, mine = golden(name)
    labels = np.concatenate([mine["labels"][:, 1:], np.full((2, 1), -100)], axis=1)
    gradients = {key.removeprefix("g/"): value for key, value in mine.items() if key.startswith("g/")}
    hf_dirs.assert_loss_and_gradients(config, weights, mine["input_ids"], labels, mine["ce"], gradients)


def test_a_mixture_in_all_layers_needs_no_dense_width():
    """Mixtral has the experts' width alone; a network of ours may have another, for MLPs that it has not."""
    moe = {"num_experts": 4, "expert_ffn_size": 24, "aux_loss": {"kind": "none"}}
    assert hf_config(tiny_config(**LLAMA_STYLE, moe=moe), "F32")["intermediate_size"] == 24
