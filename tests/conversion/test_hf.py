"""Hugging Face directories in and out."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ppfleetx
from ppfleetx.checkpoint.lazy_tensors import LazyTensor
from ppfleetx.checkpoint.model_only import read_ppfleetx
from ppfleetx.checkpoint.weights import fitted
from ppfleetx.config.errors import CheckpointError, DataError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.convert import Conversion, check_logits, convert, model_of
from ppfleetx.conversion.huggingface.config_export import hf_config
from ppfleetx.conversion.huggingface.config_import import model_keys
from ppfleetx.conversion.huggingface.directory import read_hf, write_hf
from ppfleetx.conversion.safetensors_file import write_sharded
from ppfleetx.data.tokenizer.json_files import BYTE_CHARACTERS, make_definition
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.models.gpt.spec import parameter_shapes
from tests.conversion import hf_dirs
from tests.models.gpt_builders import LLAMA_STYLE, load_golden, tiny_config

FAMILIES = ["hf_gpt2", "hf_llama"]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back_is_bit_equal_and_computes_the_same(tmp_path, name, shards):
    source = hf_dirs.write(tmp_path / "hf", name, shards=shards)
    hf_dirs.write_tokenizer(source, eos="</s>")
    _, arrays = load_golden(name)
    hf_dirs.there_and_back(source, tmp_path, arrays["tokens"], arrays["logits"], close=1e-4)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert json.loads((tmp_path / "back" / file).read_text()) == json.loads((source / file).read_text())
    after = json.loads((tmp_path / "back" / "config.json").read_text())
    assert after["torch_dtype"] == "float32"


@pytest.mark.parametrize("name", FAMILIES)
def test_sixteen_bits_stay_and_dtype_converts(tmp_path, name):
    source = hf_dirs.write(tmp_path / "hf", name, dtype=np.float16)
    convert(Conversion("hf", "hf", source, tmp_path / "same"))
    for key, value in load_file(tmp_path / "same" / "model.safetensors").items():
        assert value.dtype == np.float16
        np.testing.assert_array_equal(value, hf_dirs.golden(name)[1][key].astype(np.float16))
    convert(Conversion("hf", "ppfleetx", source, tmp_path / "b", dtype="bfloat16"))
    assert {t.dtype for t in read_ppfleetx(tmp_path / "b").tensors.values()} == {"BF16"}
    convert(Conversion("ppfleetx", "hf", tmp_path / "b", tmp_path / "c", dtype="float32"))
    for key, value in load_file(tmp_path / "c" / "model.safetensors").items():
        halved = hf_dirs.golden(name)[1][key].astype(np.float16).astype(np.float32)
        np.testing.assert_allclose(value, halved, rtol=2**-8)  # half a unit in the last of 8 bits


def test_configuration_and_tokenizer_lie_beside_the_checkpoint(tmp_path):
    source = hf_dirs.write(tmp_path / "hf", "hf_llama")
    hf_dirs.write_tokenizer(source, eos="</s>")
    step_dir = convert(Conversion("hf", "ppfleetx", source, tmp_path / "ours"))
    cfg = load_config(tmp_path / "ours" / "config.yaml")
    for key, value in model_keys(json.loads((source / "config.json").read_text())).items():
        assert getattr(cfg.Model, key) == value
    assert cfg.Data.tokenizer.eos_token == "</s>"
    assert step_dir == tmp_path / "ours" / "epoch_0_step_0"
    assert (tmp_path / "ours" / "tokenizer" / "tokenizer.json").is_file()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_of_our_own_gets_a_configuration_made_for_it(tmp_path, name):
    """After training nothing is left of the original config.json."""
    config, tensors = hf_dirs.golden(name)
    weights = read_hf(hf_dirs.write(tmp_path / "hf", name))
    model = model_of(weights, None)
    ids = {"bos_token_id": 4, "eos_token_id": [5, 6]}
    write_hf(fitted(weights, model), model, tmp_path / "out", token_ids=ids, max_file_bytes=20_000)
    for file in ("config.json", "generation_config.json"):
        made = json.loads((tmp_path / "out" / file).read_text())
        assert (made["bos_token_id"], made["eos_token_id"]) == (4, [5, 6])
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    ours, theirs = model_keys(made), model_keys(config)
    assert ours | {"initializer_range": 0} == theirs | {"initializer_range": 0}
    again = read_hf(tmp_path / "out")
    for key, tensor in again.tensors.items():
        np.testing.assert_array_equal(tensor.read(), weights.tensors[key].read())
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert set(json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]) == (
        tensors.keys() - ({"lm_head.weight"} if name == "hf_gpt2" else set())
    )


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"sandwich_norm": True}, "sandwich_norm"),
        ({"hidden_act": "relu2"}, "hidden_act = .relu2."),
        ({"attention_window": 8}, "attention_window"),
        ({**LLAMA_STYLE, "rotary_percent": 0.5, "add_mlp_bias": True}, "rotary_percent = 0.5"),
        ({**LLAMA_STYLE, "parallel_residual": True}, "llama.*parallel_residual = True"),
        ({**LLAMA_STYLE, "qk_layernorm": True, "add_mlp_bias": True}, "qk_layernorm = True"),
        ({**LLAMA_STYLE, "qk_layernorm": True, "add_qkv_bias": True}, "qk_layernorm = True"),
        ({**LLAMA_STYLE, "attention_window": 3, "add_out_proj_bias": True}, "mistral.*add_out_proj_bias"),
        ({"qk_layernorm": True}, "gpt2.*qk_layernorm"),
        ({"parallel_residual": True}, "gpt2.*parallel_residual"),
        ({"position_embedding_type": "rope", "hidden_act": "relu2"}, "hidden_act = .relu2"),
        (
            {"position_embedding_type": "rope", "attention_window": 2, "rotary_percent": 0.5},
            "attention_window",
        ),
        ({"add_mlp_bias": False}, "gpt2.*add_mlp_bias"),
        ({"num_query_groups": 2}, "num_query_groups"),
        ({"position_embedding_type": "rope", "normalization": "RMSNorm"}, "hidden_act = .gelu"),
        ({"position_embedding_type": "none"}, "position_embedding_type = .none"),
    ],
)
def test_networks_that_hugging_face_has_no_name_for(keys, message):
    with pytest.raises(CheckpointError, match=message):
        hf_config(tiny_config(**keys), "F32")


def test_an_untied_gpt2(tmp_path):
    source = hf_dirs.write(tmp_path / "hf", "hf_gpt2", tie_word_embeddings=False)
    tensors = dict(load_file(source / "model.safetensors"))
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"][::-1].copy()
    save_file(tensors, source / "model.safetensors")
    there = Conversion("hf", "ppfleetx", source, tmp_path / "ours")
    assert check_logits(there, convert(there)) < 1e-4
    assert not read_ppfleetx(tmp_path / "ours").model["tie_word_embeddings"]


@pytest.mark.parametrize(
    "stored, value, dtype, words",
    [
        ("F32", np.nan, None, "NaN or infinite in 1 of"),
        ("F16", np.inf, None, "NaN or infinite in 1 of"),
        ("BF16", np.nan, None, "NaN or infinite in 1 of"),
        ("F32", 1e5, "float16", "as float16, .*65504"),
    ],
)
@pytest.mark.parametrize("target", ["ppfleetx", "hf"])
def test_a_weight_that_is_no_number_is_refused(tmp_path, target, stored, value, dtype, words):
    config, tensors = hf_dirs.golden("hf_llama")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 5] = value
    lazy = {key: one.cast(stored) for key, one in hf_dirs.lazy(tensors).items()}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    write_sharded(tmp_path / "hf", lazy, max_bytes=1 << 30, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"decoder\.layers\.1\.mlp\.fc2.* {words}"):
        convert(Conversion("hf", target, tmp_path / "hf", tmp_path / "out", dtype=dtype))


def test_end_tokens_are_kept_where_there_is_no_tokenizer(tmp_path):
    hf_dirs.write(tmp_path / "hf", "hf_llama", eos_token_id=[5, 7])
    step = convert(Conversion("hf", "ppfleetx", tmp_path / "hf", tmp_path / "one"))
    assert load_config(step / "config.yaml").Generation.end_ids == (5,)  # generation_config.json
    (tmp_path / "hf/generation_config.json").unlink()
    step = convert(Conversion("hf", "ppfleetx", tmp_path / "hf", tmp_path / "two"))
    assert load_config(step / "config.yaml").Generation.end_ids == (5, 7)


def test_what_is_passed_over_is_said_once(tmp_path, caplog):
    hf_dirs.write(tmp_path / "hf", "hf_llama", a_new_key=3)
    (tmp_path / "hf/generation_config.json").write_text('{"do_sample": true, "top_h": 0.25}')
    convert(Conversion("hf", "ppfleetx", tmp_path / "hf", tmp_path / "ours"))
    assert caplog.text.count("'a_new_key'") == caplog.text.count("top_h = 0.25") == 1


def test_adapters_beside_a_model_are_passed_over_with_a_word(tmp_path, caplog):
    hf_dirs.write(tmp_path / "hf", "hf_llama")
    (tmp_path / "hf/adapter_config.json").write_text("{}")
    convert(Conversion("hf", "ppfleetx", tmp_path / "hf", tmp_path / "ours"))
    assert "adapters of PEFT (adapter_config.json) are left out" in caplog.text


def test_of_tied_tensors_the_files_may_hold_the_head_alone(tmp_path):
    """As safetensors' save_model leaves them."""
    _, tensors = hf_dirs.golden("hf_llama")
    words = tensors["model.embed_tokens.weight"]
    hf_dirs.write(tmp_path / "hf", "hf_llama", tie_word_embeddings=True)
    kept = {key: one for key, one in tensors.items() if key != "model.embed_tokens.weight"}
    save_file(kept | {"lm_head.weight": words}, tmp_path / "hf/model.safetensors", {"format": "pt"})
    found = read_hf(tmp_path / "hf").tensors["embedding.word_embeddings.weight"]
    np.testing.assert_array_equal(found.read(), words)


@pytest.mark.parametrize(
    ("prefix", "without", "words"),
    [
        ("_orig_mod.", "", r"embed_tokens.weight, but has '_orig_mod.model.embed_.*saved with a wrapper"),
        ("base_model.model.", "", "but has 'base_model.model.model.embed_tokens.weight'.*adapters merged"),
        (
            "",
            "lm_head.weight",
            "lacks the tensor lm_head.weight, the head: .*lacks tie_word_embeddings: true",
        ),
    ],
)
def test_files_under_other_names_or_without_a_head(tmp_path, prefix, without, words):
    directory = hf_dirs.write(tmp_path / "hf", "hf_llama")
    tensors = hf_dirs.golden("hf_llama")[1]
    named = {prefix + key: one for key, one in tensors.items() if key != without}
    save_file(named, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=words):
        read_hf(directory)


@pytest.mark.parametrize(
    ("cut", "has_end"), [(0, True), (1, True), (1, False)], ids=["whole", "one beyond", "the end beyond"]
)
def test_added_tokens_beyond_the_vocabulary(tmp_path, caplog, cut, has_end):
    """Gemma 3 has one, and so have models that got a padding token later."""
    directory = hf_dirs.write(tmp_path / "hf", "hf_llama")
    vocabulary = hf_dirs.golden("hf_llama")[0]["vocab_size"]
    names = [*list(BYTE_CHARACTERS)[: vocabulary - 2], "<|end|>", "<|image|>"]
    ids = {token: number for number, token in enumerate(names)}
    ids["<|image|>"] += cut
    if not has_end:
        ids["<|end|>"], ids["<|image|>"] = ids["<|image|>"], ids["<|end|>"]
    definition = make_definition(ids, [], ["<|end|>", "<|image|>"])
    Tokenizer(definition, eod_token="<|end|>").save(directory)
    convert(Conversion("hf", "ppfleetx", directory, tmp_path / "o"))
    if not has_end:
        with pytest.raises(DataError, match=r"has \d+ token ids, added tokens included, and the model"):
            ppfleetx.load(tmp_path / "o").generate("!", max_dec_len=2)
        return
    model = ppfleetx.load(tmp_path / "o")
    assert model.generate("!", max_dec_len=2).ids
    assert ("texts that contain '<|image|>' are refused" in caplog.text) == bool(cut)
    assert model.tokenizer.vocab_size == vocabulary
    again = pickle.loads(pickle.dumps(model.tokenizer))
    for tokenizer in (model.tokenizer, again):
        if cut:
            with pytest.raises(DataError, match=rf"the text contains '<\|image\|>', the token {vocabulary},"):
                tokenizer.encode_prompt("!<|image|>")
        else:
            assert tokenizer.encode_prompt("!<|image|>")[-1] == vocabulary - 1


def test_an_output_in_use_is_not_touched(tmp_path):
    source = hf_dirs.write(tmp_path / "hf", "hf_gpt2")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    for output, message in ((tmp_path / "out", "exists already"), (source, "the same directory")):
        with pytest.raises(CheckpointError, match=message):
            convert(Conversion("hf", "hf", source, output))
    with pytest.raises(CheckpointError, match=r"--input .*nothing: there is no such file or directory"):
        convert(Conversion("hf", "hf", tmp_path / "nothing", tmp_path / "other"))


PEAK = """
import sys
from pathlib import Path
from ppfleetx.conversion.convert import Conversion, convert
def high_water():  # not getrusage: its maximum goes back to before this program was started
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
base = high_water()
convert(Conversion(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])))
print(high_water() - base)
"""


def test_memory_is_that_of_a_few_tensors(tmp_path):
    """A model of 22 equal layers: 170 MB, the largest tensor 2.6 MB."""
    hidden, layers = 400, 22
    config = {"model_type": "gpt2", "vocab_size": 600, "n_positions": 8, "n_embd": hidden, "n_layer": layers,
              "n_head": 4}  # fmt: skip
    model = ModelConfig(**model_keys(config), vocab_size_divisible_unit=1)
    rng = np.random.default_rng(0)
    tensors = {
        name: LazyTensor("F32", shape, lambda shape=shape: rng.standard_normal(shape, np.float32))
        for name, shape in parameter_shapes(model).items()
    }
    total = sum(tensor.num_bytes for tensor in tensors.values())
    largest = max(tensor.num_bytes for tensor in tensors.values())
    write_hf(tensors, model, tmp_path / "hf")
    for command in (
        ["hf", "ppfleetx", tmp_path / "hf", tmp_path / "ours"],
        ["ppfleetx", "hf", tmp_path / "ours", tmp_path / "back"],
    ):
        done = subprocess.run([sys.executable, "-c", PEAK, *command], capture_output=True, check=True)
        peak = int(done.stdout)
        assert peak < 8 * largest + 12e6 < total / 3, f"{peak} bytes for {total}, largest tensor {largest}"


# ---- damaged directories

# (golden model, changed keys of its config.json, what the message names)
ODD_VALUES = [
    *(("hf_gpt2", {"n_embd": value}, "n_embd = ") for value in ("8", 8.5, 0, True, 10**30)),
    ("hf_gpt2", {"n_head": 7, "n_embd": 60}, "7 heads"),
    ("hf_gpt2", {"n_layer": 9000}, "9000 layers, but the files have 28 tensors"),
    ("hf_gpt2", {"n_layer": 10**9}, "n_layer = 1000000000 in config.json: must be an integer from 1"),
    ("hf_gpt2", {"n_embd": 200_000}, r"wte.weight has shape .*\[97, 200000\]"),
    ("hf_gpt2", {"layer_norm_epsilon": 0}, "layer_norm_epsilon = 0"),
    ("hf_gpt2", {"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
    ("hf_gpt2", {"scale_attn_weights": [1]}, "scale_attn_weights: "),
    ("hf_gpt2", {"model_type": ["gpt2"]}, "model_type .* is not supported"),
    ("hf_llama", {"rope_parameters": 5}, "rope_parameters = 5 must be a mapping"),
    ("hf_llama", {"rope_parameters": {"rope_theta": -1}}, "rotary_base = -1"),
    ("hf_llama", {"num_key_value_heads": 4}, "num_query_groups = 4"),
    ("hf_llama", {"head_dim": -4}, "head_dim = -4"),
    ("hf_llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("hf_llama", {"model_type": "gemma"}, "gemma"),
    ("hf_llama", {"attention_bias": True}, r"lacks the tensor .*bias"),
    ("hf_llama", {"num_hidden_layers": 1}, "does not have"),
    ("hf_llama", {"vocab_size": 96}, "embed_tokens.*97, 48.*96, 48"),
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
        ({"weight_map": where | {first: "none.safetensors"}}, r"none\.safetensors.*No such file"),
    ):
        index.write_text(json.dumps(sound | wrong))
        with pytest.raises(CheckpointError, match=words):
            read_hf(directory)
