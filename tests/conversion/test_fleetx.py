"""FleetX's model.pdparams: single, in ranks, and straight through ckpt_dir."""

import json
import os
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.checkpoint.resolve_checkpoint import open_resolved, resolve_checkpoint
from ppfleetx.checkpoint.state_dict import load_model
from ppfleetx.checkpoint.weights import fitted, with_vocabulary
from ppfleetx.config.errors import CheckpointError
from ppfleetx.conversion.convert import Conversion, convert, load_model_section
from ppfleetx.conversion.fleetx import canonical_name, read_fleetx
from ppfleetx.nn.stage import canonical_parameters
from tests.conversion.hf_dirs import write_tokenizer
from tests.helpers import programs
from tests.models.gpt_builders import build, random_tokens, tiny_config

# Columns (1) or rows (0) that FleetX's tensor parallelism cuts, by the end of the name.
CUTS = {
    "word_embeddings.weight": 0,
    "qkv_proj.weight": 1,
    "qkv_proj.bias": 0,
    "linear1.weight": 1,
    "linear1.bias": 0,
    "out_proj.weight": 0,
    "linear2.weight": 0,
}


def theirs(name):
    for ours, their in (
        ("embedding.", "gpt.embeddings."),
        ("decoder.", "gpt.decoder."),
        ("attention.qkv", "self_attn.qkv_proj"),
        ("attention.out", "self_attn.out"),
        ("input_norm", "norm1"),
        ("mlp_norm", "norm2"),
        ("mlp.fc", "linear"),
        ("final_norm", "norm"),
    ):
        name = name.replace(ours, their)
    return name


def in_pipeline(name, num_layers):
    name = name.removeprefix("gpt.")
    if name.startswith("embeddings."):
        return name.replace("embeddings.", "shared_layers.embed.", 1)
    if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name):
        return f"{int(match[1]) + 1}.{match[2]}"
    return name.replace("decoder.norm", f"{num_layers + 1}.norm")


@pytest.fixture(scope="module")
def source():
    """A model and its weights in FleetX's names, float16."""
    model = build(tiny_config(), seed=3)
    weights = {theirs(name): p.numpy().astype(np.float16) for name, p in canonical_parameters(model).items()}
    return model, weights


def save(directory, weights, *, protocol=4, tensors=True):
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: paddle.to_tensor(value) if tensors else value for name, value in weights.items()}
    paddle.save(state, str(directory / "model.pdparams"), protocol=protocol)
    return directory


def check(read, source):
    model, _ = source
    parameters = canonical_parameters(model)
    assert read.keys() == parameters.keys()
    for name, parameter in parameters.items():
        np.testing.assert_array_equal(read[name].read(), parameter.numpy().astype(np.float16), err_msg=name)


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("tensors", [True, False])
def test_a_file_written_by_paddle(tmp_path, source, protocol, tensors):
    place = save(tmp_path / "epoch_2_step_30", source[1], protocol=protocol, tensors=tensors)
    weights = read_fleetx(place)
    check(weights.tensors, source)
    assert (weights.epoch, weights.step) == (2, 30)


def test_weights_of_a_model_trained_with_paddleslims_quantization(tmp_path, source):
    """Beside them are the scales of quantizers; layers whose output has a scale are wrapped once more."""
    qkv = "gpt.decoder.layers.0.self_attn.qkv_proj"
    state = {name.replace(qkv, f"{qkv}._layer"): values for name, values in source[1].items()}
    one = np.ones(1, np.float32)
    for number in ("weight._scale", "input._scale", "input._state", "input._accum"):
        state[f"{qkv}._layer._fake_quant_{number}"] = one
    state |= {f"{qkv}._ma_output_scale._scale": one, f"{qkv}._layer._act_preprocess.alpha": one}
    check(read_fleetx(save(tmp_path, state)).tensors, source)


def test_a_tensor_saved_in_pieces(tmp_path, source):
    name = "gpt.decoder.layers.0.linear1.weight"
    state = dict(source[1])
    whole = state.pop(name)
    pieces = np.split(whole.reshape(-1), [100, 1000])
    state |= {f"{name}@@.{number}": piece for number, piece in enumerate(pieces)}
    state["UnpackBigParamInfor@@"] = {
        name: {"OriginShape": whole.shape, "slices": [f"{name}@@.{number}" for number in range(3)]}
    }
    state["StructuredToParameterName@@"] = {name: "linear_0.w_0"}
    (tmp_path / "model.pdparams").write_bytes(pickle.dumps(state, 2))
    check(read_fleetx(tmp_path).tensors, source)


def test_bfloat16(tmp_path):
    values = paddle.to_tensor(np.arange(32, dtype=np.float32)).astype("bfloat16")
    paddle.save({"gpt.decoder.norm.weight": values}, str(tmp_path / "model.pdparams"))
    [tensor] = read_fleetx(tmp_path).tensors.values()
    assert tensor.dtype == "BF16"
    np.testing.assert_array_equal(tensor.cast("F32").read(), np.arange(32))


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("mp", [1, 2])
def test_ranks_are_merged(tmp_path, source, mp, pp):
    _, weights = source
    for rank in range(mp):
        for stage in range(pp):
            part = {}
            for name, value in weights.items():
                layer = re.search(r"layers\.(\d+)\.", name)
                stages = {int(layer[1])} if layer else {pp - 1} if "norm" in name else {0, pp - 1}
                if pp > 1 and stage not in stages:
                    continue
                cut = next((dim for end, dim in CUTS.items() if name.endswith(end)), None)
                value = value if cut is None else np.split(value, mp, axis=cut)[rank]
                part[in_pipeline(name, 2) if pp > 1 else name] = value
            for sharding in range(2):  # every sharding rank writes all
                save(tmp_path / f"mp_{rank:02d}_sharding_{sharding:02d}_pp_{stage:02d}", part)
    check(read_fleetx(tmp_path).tensors, source)
    check(read_fleetx(tmp_path / f"mp_00_sharding_00_pp_{pp - 1:02d}").tensors, source)
    os.remove(tmp_path / f"mp_00_sharding_00_pp_{pp - 1:02d}" / "model.pdparams")
    if mp * pp > 1:
        with pytest.raises(CheckpointError, match="lacks"):
            read_fleetx(tmp_path)


def test_names_of_an_interleaved_pipeline():
    for name, ours in {
        "3.0.self_attn.qkv_proj.weight": "decoder.layers.2.attention.qkv.weight",
        "3.1.linear1.bias": "decoder.layers.3.mlp.fc1.bias",
        "0.embed.word_embeddings.weight": "embedding.word_embeddings.weight",
        "_layers.gpt.decoder.norm.bias": "decoder.final_norm.bias",
        "gpt.decoder.layers.0.moe.gate.weight": None,
    }.items():
        assert canonical_name(name) == ours


def test_separate_projections(tmp_path, source):
    _, weights = source
    split = {}
    for name, value in weights.items():
        if "qkv_proj" not in name:
            split[name] = value
            continue
        grouped = value.reshape(*value.shape[:-1], 4, 3, 8)
        for number, part in enumerate("qkv"):
            piece = grouped[..., number, :].reshape(*value.shape[:-1], -1)
            split[name.replace("qkv_proj", f"{part}_proj")] = piece
    save(tmp_path, split)
    check(read_fleetx(tmp_path, tiny_config()).tensors, source)
    with pytest.raises(CheckpointError, match="--config"):
        read_fleetx(tmp_path)


def logits(model):
    model.eval()
    return model(random_tokens()).numpy()


def test_a_fleetx_directory_is_a_checkpoint_to_load_from(tmp_path, source):
    model, weights = source
    place = save(tmp_path / "epoch_0_step_5" / "mp_00_sharding_00_pp_00", weights)
    for path in (place, place.parent):
        other = build(tiny_config(), seed=9)
        parameters = canonical_parameters(other)
        checkpoint = with_vocabulary(open_resolved(resolve_checkpoint(path, verify=True)), 61)
        load_model(parameters.items(), checkpoint, vocab_size=61)
        for name, parameter in canonical_parameters(model).items():
            halved = parameter.numpy().astype(np.float16).astype(np.float32)
            np.testing.assert_array_equal(parameters[name].numpy(), halved)
        np.testing.assert_allclose(logits(other), logits(model), atol=2e-3)


def test_an_output_directory_of_fleetx_means_its_last_step(tmp_path, source):
    for name in ("epoch_0_step_9", "epoch_0_step_10", "epoch_0_step_8"):
        save(tmp_path / name, source[1])
    assert resolve_checkpoint(tmp_path) == tmp_path / "epoch_0_step_10"


def test_generation_takes_it_as_ckpt_dir(tmp_path):
    """Text generated with the float16 weights of FleetX's layout, and the same text after converting them."""
    cfg = tiny_config(vocab_size=257)
    model = build(cfg, seed=3)
    weights = {theirs(n): p.numpy().astype(np.float16) for n, p in canonical_parameters(model).items()}
    place = save(tmp_path / "mp_00_sharding_00_pp_00", weights)
    write_tokenizer(tmp_path / "tokenizer")
    model_keys = cfg.model_dump(exclude_unset=True) | {"module": "GPTGenerationModule"}
    tree = {
        "Global": {"device": "cpu", "local_batch_size": 1},
        "Model": model_keys,
        "Data": {"tokenizer": {"dir": str(tmp_path / "tokenizer")}},
        "Generation": {"max_dec_len": 6, "prompt": "abc", "decode_strategy": "greedy_search"},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    section = load_model_section(tmp_path / "config.yaml")
    converted = convert(Conversion("fleetx", "ppfleetx", place, tmp_path / "ours", model=section))
    texts = []
    for path in (place, converted):
        command = [sys.executable, "tasks/gpt/generation.py", "-c", tmp_path / "config.yaml"]
        command += ["-o", f"Engine.save_load.ckpt_dir={path}", "--output", tmp_path / "out.jsonl"]
        done = programs.run(command, timeout=120, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
        texts.append((tmp_path / "out.jsonl").read_text())
    assert texts[0] == texts[1] and '"abc"' in texts[0]


def test_a_table_padded_otherwise_gives_its_true_rows(tmp_path, source):
    """FleetX pads the vocabulary to 128 times the tensor-parallel degree."""
    _, weights = source
    name = "gpt.embeddings.word_embeddings.weight"
    wide = np.full((256, 32), 7, np.float16)
    wide[:61] = weights[name][:61]
    save(tmp_path, weights | {name: wide})
    check_fit = fitted(read_fleetx(tmp_path), tiny_config())
    np.testing.assert_array_equal(check_fit["embedding.word_embeddings.weight"].read()[:61], wide[:61])
    assert not check_fit["embedding.word_embeddings.weight"].read()[61:].any()


def test_parameters_of_another_network_are_named(tmp_path, source):
    save(tmp_path, source[1] | {"ernie.pooler.weight": np.zeros(2, np.float16)})
    with pytest.raises(CheckpointError, match=r"ernie\.pooler"):
        read_fleetx(tmp_path)


def test_a_weight_that_is_no_number_is_refused_where_fleetx_is_loaded_as_it_is(tmp_path, source):
    name = next(name for name in source[1] if name.endswith("linear2.weight"))
    broken = source[1][name].copy()
    broken[1, 2] = np.nan
    place = save(tmp_path / "epoch_0_step_5" / "mp_00_sharding_00_pp_00", {**source[1], name: broken})
    checkpoint = with_vocabulary(open_resolved(resolve_checkpoint(place)), 61)
    with pytest.raises(CheckpointError, match=r"mlp\.fc2\.weight is NaN or infinite in 1 of"):
        load_model(canonical_parameters(build(tiny_config(), seed=9)).items(), checkpoint, vocab_size=61)
    assert any("mlp.fc2.weight" in sentence for sentence in checkpoint.damage())
