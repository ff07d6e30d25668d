"""Llamas of PaddleNLP and PaddleFormers: linears as [in, out], told by metadata where no shape tells."""

import json

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from ppfleetx.config.errors import CheckpointError
from ppfleetx.conversion.convert import Conversion, check_logits, convert
from ppfleetx.conversion.huggingface.directory import read_hf
from ppfleetx.conversion.huggingface.paddlenlp import to_hf_layout
from ppfleetx.conversion.huggingface.read_files import read_hf_config, read_stored
from ppfleetx.conversion.huggingface.tensor_mapping import rules

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SQUARE = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
GROUPED = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama(sizes, **more):
    """config.json and tensors in Hugging Face's layout."""
    config = {
        "model_type": "llama",
        "vocab_size": 60,
        "num_hidden_layers": 2,
        "max_position_embeddings": 16,
        "tie_word_embeddings": False,
        **sizes,
        **more,
    }
    shapes = {n: shape for rule in rules(config) for n, shape in zip(rule.theirs, rule.shapes, strict=True)}
    rng = np.random.default_rng(1)
    return config, {name: rng.standard_normal(shape, np.float32) * 0.4 for name, shape in shapes.items()}


def of_paddle(tensors, prefix="model.", turn_head=False):
    """The same as Paddle's libraries store it."""
    turned = {}
    for name, array in tensors.items():
        is_turned = name.split(".")[-2] in LINEARS or (turn_head and name == "lm_head.weight")
        turned[name.replace("model.", prefix, 1)] = np.ascontiguousarray(array.T) if is_turned else array
    return turned


def write(directory, config, tensors, metadata=None, name="config.json"):
    directory.mkdir()
    (directory / name).write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata)
    return directory


def check(directory, tensors):
    """The directory is read as the tensors of Hugging Face's layout would be."""
    stored = read_stored(directory)
    config = read_hf_config(directory)
    found = to_hf_layout(stored, config, read_hf(directory).model, directory)
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(found[name].read(), array, err_msg=name)


@pytest.mark.parametrize("sizes", [SQUARE, GROUPED], ids=["square", "grouped"])
@pytest.mark.parametrize(
    "form, prefix, turn_head",
    [("np", "model.", False), ("np", "llama.", True), ("paddle", "model.", False), ("pd", "model.", True)],
)
def test_paddles_safetensors(tmp_path, sizes, form, prefix, turn_head):
    config, tensors = llama(sizes)
    source = write(tmp_path / "paddle", config, of_paddle(tensors, prefix, turn_head), {"format": form})
    check(source, tensors)
    there = Conversion("hf", "ppfleetx", source, tmp_path / "ours")
    assert check_logits(there, convert(there)) < 1e-4
    # Out again in Hugging Face's own layout and names, whatever it came in.
    back = Conversion("hf", "hf", source, tmp_path / "hf")
    assert check_logits(back, convert(back)) < 1e-4
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, tensors[name], err_msg=name)


def test_files_of_hugging_face_stay_what_they_are(tmp_path):
    """Without metadata, with PyTorch's, and with `np` where shapes show Hugging Face's layout."""
    square, grouped = llama(SQUARE), llama(GROUPED)
    for name, (config, tensors), metadata in (
        ("none", square, None),
        ("pt", square, {"format": "pt"}),
        ("np", grouped, {"format": "np"}),
    ):
        source = write(tmp_path / name, config, tensors, metadata)
        check(source, tensors)
    # A file that says nothing, beside a configuration of PaddleNLP's.
    config, tensors = square
    marked = write(tmp_path / "marked", config | {"paddlenlp_version": "2.8"}, of_paddle(tensors))
    check(marked, tensors)


@pytest.mark.parametrize("shards", [1, 2])
def test_paddlenlps_pickles(tmp_path, shards):
    config, tensors = llama(SQUARE)
    stored = {name: paddle.to_tensor(v) for name, v in of_paddle(tensors, "llama.", True).items()}
    (tmp_path / "nlp").mkdir()
    old = {"init_args": [{"init_class": "LlamaModel", **config}], "init_class": "LlamaForCausalLM"}
    (tmp_path / "nlp" / "model_config.json").write_text(json.dumps(old))
    if shards == 1:
        paddle.save(stored, str(tmp_path / "nlp" / "model_state.pdparams"))
    else:
        where = {name: f"model_state-{i % 2 + 1:05d}-of-00002.pdparams" for i, name in enumerate(stored)}
        for file in set(where.values()):
            part = {name: stored[name] for name in stored if where[name] == file}
            paddle.save(part, str(tmp_path / "nlp" / file))
        index = tmp_path / "nlp" / "model_state.pdparams.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    there = Conversion("hf", "ppfleetx", tmp_path / "nlp", tmp_path / "ours")
    assert check_logits(there, convert(there)) < 1e-4
    check(tmp_path / "nlp", tensors)


def test_paddles_bfloat16(tmp_path):
    """NumPy knows no bfloat16: Paddle writes its bits as 16-bit integers without sign."""
    config, tensors = llama(SQUARE)
    bits = {
        name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in of_paddle(tensors).items()
    }
    source = write(tmp_path / "paddle", config, bits, {"format": "np"})
    assert {tensor.dtype for tensor in read_hf(source).tensors.values()} == {"BF16"}
    there = Conversion("hf", "ppfleetx", source, tmp_path / "ours")
    assert check_logits(there, convert(there)) < 1e-4
    with pytest.raises(CheckpointError, match="U16"):
        read_hf(write(tmp_path / "pt", config, bits, {"format": "pt"}))


def test_what_paddleformers_leaves_out(tmp_path):
    """A tied head is its default, and not Hugging Face's."""
    config, tensors = llama(SQUARE, tie_word_embeddings=True)
    del config["tie_word_embeddings"]
    config |= {"paddleformers_version": "0.4", "fuse_attention_qkv": False, "lm_head_bias": False}
    source = write(tmp_path / "paddle", config, of_paddle(tensors), {"format": "paddle"})
    back = Conversion("hf", "hf", source, tmp_path / "hf")
    assert check_logits(back, convert(back)) < 1e-4
    made = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert made["tie_word_embeddings"] is True
    assert not made.keys() & {"paddleformers_version", "fuse_attention_qkv", "lm_head_bias"}


def test_what_cannot_be_told_or_read_is_refused(tmp_path):
    config, tensors = llama(SQUARE)
    fused = {name: v for name, v in of_paddle(tensors).items() if "q_proj" not in name}
    fused |= {f"model.layers.{i}.self_attn.qkv_proj.weight": np.zeros((32, 96), np.float32) for i in (0, 1)}
    grouped_config, grouped = llama(GROUPED)
    mixed = of_paddle(grouped) | {k: v for k, v in grouped.items() if "down_proj" in k}
    head_config, head = llama(SQUARE | {"vocab_size": 32})
    head["lm_head.weight"], head["model.embed_tokens.weight"] = (np.zeros((32, 32), np.float32),) * 2
    for name, (one, two), words in (
        ("fused", (config, fused), "qkv_proj.weight, projections that PaddleNLP has fused"),
        ("mixed", (grouped_config, mixed), r"stored as \[in, out\] and .*down_proj.weight as \[out, in\]"),
        ("head", (head_config, of_paddle(head)), "lm_head.weight is square"),
    ):
        with pytest.raises(CheckpointError, match=words):
            read_hf(write(tmp_path / name, one, two, {"format": "np"}))
