"""Megatron-LM's classic checkpoints, made by PyTorch (recipe: tests/goldens/make_torch_goldens.py), or, with
experts, made here from weights of ours."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppfleetx.checkpoint.weights import fitted
from ppfleetx.config.errors import CheckpointError, UserError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.rope import RopeScalingConfig
from ppfleetx.conversion import megatron
from ppfleetx.conversion.convert import model_of
from ppfleetx.conversion.huggingface.config_import import model_keys
from ppfleetx.conversion.join_parameters import split_parts
from ppfleetx.conversion.megatron import read_megatron
from ppfleetx.conversion.safe_unpickler import Record
from ppfleetx.models.gpt.spec import parameter_specs
from ppfleetx.nn.mlp_spec import GATE_AND_UP
from tests.conversion import hf_dirs
from tests.helpers.hf_weights import hf_to_canonical
from tests.models.gpt_builders import GOLDENS

MEGATRON = GOLDENS / "megatron"
LLAMA = MEGATRON / "llama_tp2" / "iter_0000003"


def expected(name):
    """Our weights of a golden model by the Hugging Face maps, which are tested on their own."""
    hf_config, weights = hf_dirs.golden(name)
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
    weights = read_megatron(LLAMA)
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
    weights = read_megatron(LLAMA)
    model = model_of(weights, None)
    with pytest.raises(CheckpointError, match="rotary_base"):
        model_of(weights, model.model_copy(update={"rotary_base": 5e5}))


LLAMA3 = {"type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4}
LLAMA3 |= {"original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "options, scaling",
    [
        ({}, None),
        ({"rotary_seq_len_interpolation_factor": 4}, {"type": "linear", "factor": 4}),
        ({"use_rope_scaling": True}, LLAMA3 | {"factor": 8}),
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0}, LLAMA3 | {"factor": 32}),
    ],
)
def test_scaled_rotary_positions(monkeypatch, options, scaling):
    """Linear interpolation, and Llama 3's with the constants that Megatron has in its code."""
    give(monkeypatch, options)
    weights = read_megatron(LLAMA)
    found = model_of(weights, None).rope_scaling
    assert found == (None if scaling is None else RopeScalingConfig(**scaling))
    other = RopeScalingConfig(type="linear", factor=3)
    with pytest.raises(CheckpointError, match="rope_scaling"):
        model_of(weights, model_of(weights, None).model_copy(update={"rope_scaling": other}))


def test_a_part_of_each_head_may_be_turned(monkeypatch):
    give(monkeypatch, {"rotary_percent": 0.5})
    assert model_of(read_megatron(LLAMA), None).rotary_percent == 0.5


@pytest.mark.parametrize(
    "place, golden, options, kind",
    [
        ("gpt2_tp2_pp2", "hf_gpt2", {"apply_layernorm_1p": True}, "LayerNorm1P"),
        (LLAMA, "hf_llama", {"layernorm_zero_centered_gamma": True}, "RMSNorm1P"),
        (LLAMA, "hf_llama", {"apply_layernorm_1p": False}, "RMSNorm"),
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


# ---- mixtures of experts

ARGUMENTS = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "ffn_hidden_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "position_embedding_type": "rope",
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "num_experts": 4,
    "moe_layer_freq": [0, 1],
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 40,
    "moe_shared_expert_gate": True,
    "moe_aux_loss_coeff": 0.01,
}
OUTSIDE = {
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "decoder.final_norm.weight": "decoder.final_layernorm.weight",
    "head.weight": "output_layer.weight",
}
IN_LAYER = {
    "input_norm.weight": "input_layernorm.weight",
    "attention.qkv.weight": "self_attention.linear_qkv.weight",
    "attention.out_proj.weight": "self_attention.linear_proj.weight",
    "mlp_norm.weight": "pre_mlp_layernorm.weight",
    "mlp.fc1.weight": "mlp.linear_fc1.weight",
    "mlp.fc2.weight": "mlp.linear_fc2.weight",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.expert_bias",
    "mlp.shared.fc1.weight": "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared.fc2.weight": "mlp.shared_experts.linear_fc2.weight",
    "mlp.shared_gate.weight": "mlp.shared_experts.gate_weight",
}
FORMS = {
    "layers": "mlp.experts.local_experts.{number}.linear_{linear}.weight",
    "transformer engine": "mlp.experts.linear_{linear}.weight{number}",
    "together": "mlp.experts.weight{last}",
}


def files_of(
    ours: dict[str, np.ndarray], form: str, mp: int, ep: int
) -> dict[tuple[int, int], dict[str, Any]]:
    """For each tensor and expert rank its parameters under Megatron's names."""
    files: dict[tuple[int, int], dict[str, Any]] = {(t, e): {} for t in range(mp) for e in range(ep)}
    for (tensor_rank, expert_rank), file in files.items():

        def part(name: str, array: np.ndarray, rank: int = tensor_rank) -> np.ndarray:
            """A matrix of ours as ``[out, in]``, or the share of it that a tensor rank has."""
            if name.endswith("fc1.weight"):
                gate, up = (np.split(half, mp, -1)[rank] for half in split_parts(GATE_AND_UP, array))
                return np.concatenate([gate, up], -1).T
            if name == "attention.qkv.weight":
                return np.split(array, mp, -1)[rank].T
            if name.endswith(("fc2.weight", "out_proj.weight")):
                return np.split(array, mp, 0)[rank].T
            return array.T

        for name, array in ours.items():
            _, _, in_layer = name.partition("decoder.layers.")
            number, _, bare = in_layer.partition(".")
            if name in OUTSIDE:
                is_cut = not name.startswith("decoder")
                whole = array.T if name == "head.weight" else array
                file[OUTSIDE[name]] = np.split(whole, mp, 0)[tensor_rank] if is_cut else whole
            elif bare in IN_LAYER:
                file[f"decoder.layers.{number}.{IN_LAYER[bare]}"] = part(bare, array)
            elif ".experts." in bare:
                linear = bare.split(".")[2]
                held = [part(bare, one) for one in np.split(array, ep)[expert_rank]]
                if form == "together":  # [in, out] of each, one after the other in memory
                    flat, hidden = np.stack([one.T for one in held]), ARGUMENTS["hidden_size"]
                    shape = (hidden, -1) if linear == "fc1" else (-1, hidden)
                    file[f"decoder.layers.{number}.{FORMS[form].format(last=linear[-1])}"] = flat.reshape(
                        shape
                    )
                    continue
                for local, one in enumerate(held):
                    theirs = FORMS[form].format(number=local, linear=linear)
                    file[f"decoder.layers.{number}.{theirs}"] = one
    return files


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Path, dict[str, Any]]:
    """What files hold, in place of reading them."""
    trees: dict[Path, dict[str, Any]] = {}
    monkeypatch.setattr(megatron, "read_torch_file", lambda path, **_: trees[path])
    return trees


def write(
    directory: Path, trees: dict[Path, dict[str, Any]], form: str, mp: int, ep: int, **options: Any
) -> dict:
    """A checkpoint of random weights; these, by our names."""
    args = Record()
    args.state = ARGUMENTS | {"tensor_model_parallel_size": mp, "expert_model_parallel_size": ep} | options
    model = megatron.network_of(megatron._model_keys(args.state, directory), "")
    rng = np.random.default_rng(0)
    ours = {
        name: rng.standard_normal(spec.shape, np.float32)
        for name, spec in parameter_specs(model).items()
        if not name.endswith("router.load")
    }
    for (tensor_rank, expert_rank), file in files_of(ours, form, mp, ep).items():
        rank = directory / (f"mp_rank_{tensor_rank:02d}" + (f"_{expert_rank:03d}" if ep > 1 else ""))
        rank.mkdir()
        (rank / "model_optim_rng.pt").touch()
        tree = {"args": args, "checkpoint_version": 3.0, "model": hf_dirs.lazy(file)}
        trees[rank / "model_optim_rng.pt"] = tree
    return ours


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mp, ep", [(1, 1), (1, 2), (2, 2)])
def test_experts_of_all_ranks_are_read(tmp_path, stored, form, mp, ep):
    ours = write(tmp_path, stored, form, mp, ep)
    weights = read_megatron(tmp_path)
    model = model_of(weights, None)
    assert model.moe.layers == (1,) or model.moe.first_dense_layers == 1
    assert (model.moe.num_experts, model.moe.top_k, model.moe.expert_ffn_size) == (4, 2, 24)
    assert (model.moe.router.score, model.moe.router.bias) == ("sigmoid", True)
    found = fitted(weights, model)
    for name, array in ours.items():
        np.testing.assert_array_equal(found[name].read(), array, err_msg=name)
    assert found.keys() - ours.keys() == {"decoder.layers.1.mlp.router.load"}


EXPERT = "decoder.layers.1.mlp.experts.linear_fc1.weight{}"


@pytest.mark.parametrize(
    "number, words", [(1, r"lacks experts \[1, 3\]"), (9, "beyond those of the options")]
)
def test_experts_that_are_missing_or_too_many_are_named(tmp_path, stored, number, words):
    write(tmp_path, stored, "transformer engine", 1, 2)
    for tree in stored.values():
        tensor = tree["model"].pop(EXPERT.format(number), None)
        if tensor is None:
            tree["model"][EXPERT.format(number)] = tree["model"][EXPERT.format(0)]
    with pytest.raises(UserError, match=words):
        read_megatron(tmp_path)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"expert_model_parallel_size": 4}, "lacks expert rank 2 of 4"),
        ({"expert_model_parallel_size": 1}, r"lacks experts \[2, 3\]"),
        ({"expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2}, "expert_tensor_parallel_size"),
        ({"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, stored, options, words):
    write(tmp_path, stored, "layers", 1, 2)
    for tree in stored.values():
        tree["args"].state |= options
    with pytest.raises(UserError, match=words):
        read_megatron(tmp_path)
