"""GGUF in and out."""

import json
import os
from contextlib import ExitStack
from pathlib import Path

import gguf
import numpy as np
import pytest

from ppfleetx.checkpoint.lazy_tensors import LazyTensor
from ppfleetx.checkpoint.model_only import read_ppfleetx
from ppfleetx.checkpoint.weights import fitted
from ppfleetx.commands.main import call
from ppfleetx.commands.resolve_model import resolve_model
from ppfleetx.config.errors import CheckpointError, UserError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.convert import Conversion, convert
from ppfleetx.conversion.detect import described
from ppfleetx.conversion.gguf import extract_tokenizer, read_gguf, write_gguf
from ppfleetx.conversion.gguf_tokenizer import tokenizer_metadata, tokenizer_texts
from ppfleetx.conversion.huggingface.config_export import describes, hf_config
from ppfleetx.conversion.huggingface.config_import import model_keys
from ppfleetx.conversion.huggingface.directory import write_hf
from ppfleetx.conversion.huggingface.families import FAMILIES
from ppfleetx.conversion.safetensors_file import read_safetensors
from ppfleetx.data.tokenizer.json_files import BYTE_CHARACTERS, make_definition, write_files
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.nn.rope_scaling import inverse_frequencies
from tests.conversion import hf_dirs
from tests.models.gpt_builders import LLAMA_STYLE, tiny_config

GOLDENS = Path(__file__).parents[1] / "goldens"
VOCABULARY = 260
SIZES = {"vocab_size": VOCABULARY, "vocab_size_divisible_unit": 1, "max_position_embeddings": 64}
LLAMA3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
NEOX = {"position_embedding_type": "rope", "normalization": "LayerNorm", "tie_word_embeddings": False}
NETWORKS = {
    "llama": LLAMA_STYLE,
    "llama_with_biases": LLAMA_STYLE | {"add_qkv_bias": True, "add_out_proj_bias": True},
    "llama_tied_3.1": LLAMA_STYLE | {"tie_word_embeddings": True, "rotary_base": 5e5, "rope_scaling": LLAMA3},
    "llama_yarn": LLAMA_STYLE | {"rope_scaling": YARN},
    "llama_linear": LLAMA_STYLE | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "qwen2": LLAMA_STYLE | {"add_qkv_bias": True, "add_out_proj_bias": False},
    "qwen3": LLAMA_STYLE | {"qk_layernorm": True, "head_dim": 12},
    "gpt2": {},
    "gpt_neox": NEOX | {"rotary_percent": 0.5, "parallel_residual": True},
}
_HF_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_GEMMA = _HF_SIZES | {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 8}
_LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.5]}
_SCALES = {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 4.0}
CONFIGS = {
    "smollm3": _HF_SIZES,
    "granite": _HF_SIZES | _SCALES | {"embedding_multiplier": 3.0, "attention_bias": True},
    "gemma": _HF_SIZES | {"head_dim": 12},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _GEMMA | {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "phi3": _HF_SIZES | {"sliding_window": 9},
    "phi3 with LongRoPE": _HF_SIZES
    | {"sliding_window": None, "rope_scaling": _LONGROPE, "original_max_position_embeddings": 16},
    "olmo2": _HF_SIZES,
    "starcoder2": _HF_SIZES | {"sliding_window": None},
    "stablelm": _HF_SIZES | {"use_qkv_bias": True, "use_parallel_residual": True},
    "stablelm with norms of heads": _HF_SIZES | {"qk_layernorm": True, "partial_rotary_factor": 0.5},
    "cohere": _HF_SIZES | {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": _HF_SIZES | {"logit_scale": 0.25, "sliding_window": 8, "head_dim": 8},
}
"""Settings of a ``config.json``, by ``model_type``."""


def tokenizer_files() -> dict[str, str]:
    """A tokenizer of single bytes with a chat template."""
    vocab = {token: number for number, token in enumerate([*BYTE_CHARACTERS, "<|user|>", "<|end|>"])}
    definition = make_definition(vocab, [], ["<|user|>", "<|end|>"])
    files = {"tokenizer.json": json.dumps(definition)}
    config = {"eos_token": "<|end|>", "chat_template": "{{ messages[0]['content'] }}<|end|>"}
    return files | {"tokenizer_config.json": json.dumps(config)}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_files(tokenizer_files(), tmp_path / "tokenizer")
    return Tokenizer.load(tmp_path / "tokenizer")


def hf_config_of(name: str) -> dict[str, object]:
    return {"model_type": name.split()[0], **CONFIGS[name]}


def network(name: str, **changes: object) -> tuple[ModelConfig, dict[str, LazyTensor]]:
    if name in CONFIGS:
        model = ModelConfig(**model_keys(hf_config_of(name) | changes), vocab_size_divisible_unit=1)
    else:
        model = tiny_config(**NETWORKS[name] | SIZES | changes)
    return model, hf_dirs.random_tensors(model)


@pytest.fixture
def llama(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A file."""
    model, tensors = network("llama")
    write_gguf(tensors, model, tmp_path / "a.gguf", tokenizer=tokenizer)
    return tmp_path / "a.gguf"


@pytest.mark.parametrize("name", [*NETWORKS, *CONFIGS])
def test_there_and_back(tmp_path, tokenizer, name):
    model, tensors = network(name)
    source = {"config": hf_config_of(name)} if name in CONFIGS else None
    write_gguf(tensors, model, tmp_path / "a.gguf", tokenizer=tokenizer, source=source)
    weights = read_gguf(tmp_path / "a.gguf")
    again = ModelConfig(**weights.model, vocab_size_divisible_unit=1)
    found = fitted(weights, again)
    assert found.keys() == tensors.keys()
    for key, one in found.items():
        # Gemma's norms are stored with 1 added.
        np.testing.assert_allclose(one.read(), tensors[key].read(), 0, 5e-7, err_msg=key)
    if name in CONFIGS:
        assert again == model.model_copy(update={"initializer_range": again.initializer_range})
    assert [path.name for path in tmp_path.iterdir() if "gguf" in path.name] == ["a.gguf"]
    config = weights.source["config"]  # of an export; programs beside transformers look for architectures
    assert source is None or config["model_type"] == source["config"]["model_type"]
    assert config["architectures"] == [FAMILIES[config["model_type"]].architecture]


@pytest.mark.parametrize("name, key", [("gpt2", "n_inner"), ("llama", "num_key_value_heads")])
def test_null_in_config_json_is_the_default(tmp_path, tokenizer, name, key):
    """transformers writes null for what was not given."""
    model, tensors = network(name, **({"num_query_groups": None} if name == "llama" else {}))
    config = hf_config(model, "F32") | {key: None}
    assert describes(config, model)
    write_gguf(tensors, model, tmp_path / "a.gguf", tokenizer=tokenizer, source={"config": config})
    assert describes(read_gguf(tmp_path / "a.gguf").source["config"], model)


def test_longrope_of_another_network_than_phi3_names_its_type(tmp_path, tokenizer):
    """Otherwise llama.cpp does not expect the factors."""
    model, tensors = network(
        "llama", rope_scaling=_LONGROPE | {"factor": 4.0, "original_max_position_embeddings": 16}
    )
    write_gguf(tensors, model, tmp_path / "a.gguf", tokenizer=tokenizer)
    field = gguf.GGUFReader(tmp_path / "a.gguf").fields["llama.rope.scaling.type"]
    assert field.contents() == "longrope"


def test_a_file_that_is_replaced_is_read_anew(tmp_path, tokenizer):
    """Even one of equal size and time."""
    model, tensors = network("qwen3")
    path, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_gguf(tensors, model, path, tokenizer=tokenizer)
    others = {
        name: LazyTensor("F32", one.shape, lambda one=one: -one.read()) for name, one in tensors.items()
    }
    write_gguf(others, model, other, tokenizer=tokenizer)
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    first = next(iter(fitted(read_gguf(path), model).values())).read().copy()
    other.replace(path)
    second = next(iter(fitted(read_gguf(path), model).values())).read()
    np.testing.assert_array_equal(second, -first)


def test_queries_and_keys_are_in_the_order_of_llama_cpp(tmp_path, tokenizer):
    """It rotates the features 2i and 2i + 1 of a head; transformers i and i + half a head."""
    model, tensors = network("llama")
    write_gguf(tensors, model, tmp_path / "a.gguf", tokenizer=tokenizer)
    write_hf(tensors, model, tmp_path / "hf")
    stored = {one.name: one.data for one in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    theirs = {
        name: tensor.read() for name, tensor in read_safetensors(tmp_path / "hf/model.safetensors").items()
    }
    half = model.head_size // 2
    order = [part * half + pair for pair in range(half) for part in (0, 1)]
    for gguf_name, name in (("attn_q", "q_proj"), ("attn_k", "k_proj")):
        wanted = theirs[f"model.layers.0.self_attn.{name}.weight"].reshape(-1, 2 * half, model.hidden_size)
        np.testing.assert_array_equal(
            stored[f"blk.0.{gguf_name}.weight"], wanted[:, order].reshape(-1, model.hidden_size)
        )
    np.testing.assert_array_equal(
        stored["blk.0.attn_v.weight"], theirs["model.layers.0.self_attn.v_proj.weight"]
    )


def test_norms_of_heads_are_float32(tmp_path, tokenizer):
    """llama.cpp does not multiply by norms of other types."""
    model, tensors = network("cohere")
    write_gguf(tensors, model, tmp_path / "a.gguf", tokenizer=tokenizer, dtype="q8_0")
    kinds = {one.name: one.tensor_type.name for one in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert {kinds[f"blk.0.{name}.weight"] for name in ("attn_q_norm", "attn_k_norm", "attn_norm")} == {"F32"}


def test_norms_of_heads_are_rows_of_one_tensor(tmp_path, tokenizer):
    """transformers has one tensor for each head of a StableLM."""
    model, tensors = network("stablelm with norms of heads")
    write_gguf(tensors, model, tmp_path / "a.gguf", tokenizer=tokenizer)
    write_hf(tensors, model, tmp_path / "hf")
    stored = {one.name: one.data for one in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    theirs = read_safetensors(tmp_path / "hf/model.safetensors")
    for part, heads in (("q", model.num_attention_heads), ("k", model.num_query_groups)):
        rows = [f"model.layers.1.self_attn.{part}_layernorm.norms.{head}.weight" for head in range(heads)]
        wanted = np.stack([theirs[row].read() for row in rows])
        np.testing.assert_array_equal(stored[f"blk.1.attn_{part}_norm.weight"], wanted)


@pytest.mark.parametrize(
    ("dtype", "close"), [("q8_0", 0.02), ("q4_0", 0.4), ("q4_1", 0.3), ("float16", 2e-3)]
)
def test_fewer_bits(tmp_path, dtype, close):
    """Through the command; matrices whose rows are no multiple of 32 are float16, vectors float32."""
    model, tensors = network("llama", hidden_size=64, ffn_hidden_size=80)
    write_hf(tensors, model, tmp_path / "hf")
    write_files(tokenizer_files(), tmp_path / "hf")
    output = tmp_path / "a.gguf"
    command = ["--from", "hf", "--to", "gguf", "--input", str(tmp_path / "hf"), "--dtype", dtype]
    call("convert", [*command, "--output", str(output)])
    types = {one.name: one.tensor_type.name for one in gguf.GGUFReader(output).tensors}
    small = {"float16": "F16"}.get(dtype, dtype.upper())
    assert types["blk.0.attn_q.weight"] == small
    assert types["blk.0.ffn_down.weight"] == "F16"
    assert types["token_embd.weight"] == ("F16" if dtype == "float16" else "Q8_0")
    assert types["blk.0.attn_norm.weight"] == "F32"
    convert(Conversion("gguf", "ppfleetx", output, tmp_path / "ours"))
    found = read_ppfleetx(tmp_path / "ours").tensors
    for key, one in tensors.items():
        without_padding = found[key].read()[tuple(map(slice, one.shape))]
        assert np.abs(without_padding.astype(np.float32) - one.read()).max() < close, key
    ours = Tokenizer.load(tmp_path / "ours/tokenizer")
    assert ours.encode("a text") == list(b"a text")
    assert ours.chat_templates["default"].endswith("<|end|>")
    assert ours.eod_token == "<|end|>"


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1"])
def test_types_that_are_only_read(tmp_path, tokenizer, kind):
    """As the library dequantizes them."""
    model, tensors = network("llama", hidden_size=256, num_attention_heads=4)
    write_gguf(tensors, model, tmp_path / "a.gguf", tokenizer=tokenizer)
    kind = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    name, rng = "blk.1.attn_output.weight", np.random.default_rng(0)
    blocks = rng.integers(0, 60, (model.hidden_size, model.hidden_size // block * size), np.uint8)
    rewrite(tmp_path / "a.gguf", tmp_path / "b.gguf", data={name: (blocks, kind)})
    found = read_gguf(tmp_path / "b.gguf").tensors["decoder.layers.1.attention.out_proj.weight"].read()
    np.testing.assert_array_equal(found, gguf.quants.dequantize(blocks, kind).T)


def rewrite(source, target, *, metadata=None, data=None, without=()):
    """A copy of a file with other metadata (None leaves a key out) and tensors."""
    reader, metadata, data = gguf.GGUFReader(source), metadata or {}, data or {}
    own = {key: one for key, one in reader.fields.items() if not key.startswith("GGUF.")}
    architecture = metadata.get("general.architecture", own["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, architecture)
    for key, one in own.items():
        value = metadata.get(key, one.contents())
        if key != "general.architecture" and value is not None:
            kind, *inner = one.types
            writer.add_key_value(key, value, kind, inner[0] if inner else None)
    for key in metadata.keys() - own.keys():
        add = {float: writer.add_float32, int: writer.add_int32, str: writer.add_string}[type(metadata[key])]
        add(key, metadata[key])
    for one in reader.tensors:
        if one.name not in without:
            array, kind = data.get(one.name, (one.data, one.tensor_type))
            writer.add_tensor(one.name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("number", [-1, 5000])
def test_ids_that_are_no_token_are_none(tmp_path, llama, number):
    """Some writers put -1 for a token that a model does not have."""
    given = {"tokenizer.ggml.bos_token_id": number, "tokenizer.ggml.padding_token_id": number}
    rewrite(llama, tmp_path / "b.gguf", metadata=given)
    config = read_gguf(tmp_path / "b.gguf").source["config"]
    assert "bos_token_id" not in config and "pad_token_id" not in config
    extract_tokenizer(tmp_path / "b.gguf", tmp_path / "b")
    assert "bos_token" not in json.loads((tmp_path / "b/tokenizer_config.json").read_text())


# ---- what is refused


def cut(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def changed(**kwargs):
    def damage(path):
        rewrite(path, path.with_suffix(".new"), **kwargs)
        path.with_suffix(".new").rename(path)

    return damage


def said(key, value):
    return changed(metadata={key: value})


DAMAGES = {
    "is damaged or cut off": lambda path: cut(path, 0.7),
    "is damaged or cut off:": lambda path: cut(path, 0.1),
    "is not a GGUF file": lambda path: path.write_text("<html>not found</html>"),
    "is not a GGUF file: it": lambda path: path.write_bytes(b""),
    "Git LFS": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1"),
    "general.architecture 'mamba' is not supported": said("general.architecture", "mamba"),
    "is one of 3 parts": said("split.count", 3),
    "lacks the tensor blk.1.ffn_up.weight": changed(without=["blk.1.ffn_up.weight"]),
    "tensors that this network does not have: blk.1": said("llama.block_count", 1),
    "has shape": said("llama.embedding_length", 64),
    "tokenizer.ggml.model 't5', is not supported": said("tokenizer.ggml.model", "t5"),
    "splits text as 'tekken'": said("tokenizer.ggml.pre", "tekken"),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_what_is_refused(tmp_path, llama, message):
    DAMAGES[message](llama)
    command = ["--from", "gguf", "--to", "ppfleetx", "--input", str(llama)]
    command += ["--output", str(tmp_path / "ours")]
    with pytest.raises(UserError) as raised:  # exit code 2
        call("convert", command)
    assert message in str(raised.value)
    assert str(llama) in str(raised.value)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"attention_window": 4}, "attention_window = 4"),
        ("gpt_neox", {"hidden_act": "gelu_exact"}, "hidden_act = 'gelu_exact'"),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}}, "is not the scaling of Llama 3.1"),
        ("llama", {"moe": {"num_experts": 4}}, "is a mixtral, which cannot be written as GGUF"),
        ("gemma2", {"query_pre_attn_scalar": 16}, "attention_multiplier = 0.25"),
        ("starcoder2", {"sliding_window": 8}, "attention_window = 7"),
        ("starcoder2", {"use_bias": False}, "add_qkv_bias = False"),  # llama.cpp cannot read it
    ],
)
def test_networks_that_are_not_written(tmp_path, tokenizer, name, changes, message):
    model, tensors = network(name, **changes)
    with pytest.raises(CheckpointError, match=message):
        write_gguf(tensors, model, tmp_path / "a.gguf", tokenizer=tokenizer)
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.parametrize(
    ("key", "target", "output", "dtype", "has_tokenizer"),
    [
        ("--dtype", "ppfleetx", "new", "q8_0", True),
        ("--output", "gguf", "new", None, True),
        ("--output", "gguf", "no/such/a.gguf", None, True),
        ("--tokenizer", "gguf", "a.gguf", None, False),
    ],
)
def test_options_that_contradict(tmp_path, key, target, output, dtype, has_tokenizer):
    source = hf_dirs.write(tmp_path / "hf", "hf_llama")
    if has_tokenizer:
        hf_dirs.write_tokenizer(source)
    with pytest.raises(UserError, match=key):
        convert(Conversion("hf", target, source, tmp_path / output, dtype=dtype))


def test_a_file_where_a_directory_is_meant(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="is a GGUF file: give --from gguf"):
        convert(Conversion("hf", "ppfleetx", tmp_path / "a.gguf", tmp_path / "new"))


# ---- tokenizers


@pytest.mark.parametrize("name", ["gpt2", "gpt2_pair", "llama2_plain", "llama3", "chat"])
def test_tokenizers_there_and_back(tmp_path, name):
    told = json.loads((GOLDENS / "hf_tokenizers.json").read_text())[name]
    first = Tokenizer.load(GOLDENS / "tokenizers" / name)
    metadata = tokenizer_metadata(first, first.vocab_size + 3)
    assert len(metadata["tokenizer.ggml.tokens"]) == first.vocab_size + 3
    write_files(tokenizer_texts(metadata, "a.gguf"), tmp_path)
    again = Tokenizer.load(tmp_path)
    for text in (one["text"] for one in told["texts"]):
        if "<wide>" in text:  # swallows the spaces around it, which a GGUF file cannot say
            continue
        assert again.encode_prompt(text) == first.encode_prompt(text), text
    assert again.end_ids[0] == first.end_ids[0]


@pytest.mark.parametrize("ignores_merges", [True, False])
def test_merges_that_are_ignored(tmp_path, ignores_merges):
    """The name of the pre-tokenizer says it: Llama 3 ignores merges where a whole word is a token. OLMo 2
    splits text in the same way, and does not."""
    source = GOLDENS / "tokenizers" / "llama3"
    files = {file.name: file.read_text() for file in source.glob("*.json")}
    definition = json.loads(files["tokenizer.json"])
    definition["model"]["ignore_merges"] = ignores_merges
    write_files(files | {"tokenizer.json": json.dumps(definition)}, tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    metadata = tokenizer_metadata(tokenizer, tokenizer.vocab_size)
    assert metadata["tokenizer.ggml.pre"] == ("llama-bpe" if ignores_merges else "dbrx")
    again = json.loads(tokenizer_texts(metadata, "a.gguf")["tokenizer.json"])
    assert again["model"]["ignore_merges"] == ignores_merges


def test_spaces_after_special_tokens_of_phi3():
    first = Tokenizer.load(GOLDENS / "tokenizers" / "llama2_plain")
    metadata = tokenizer_metadata(first, first.vocab_size)
    for architecture in ("llama", "phi3"):
        texts = tokenizer_texts(metadata | {"general.architecture": architecture}, "a.gguf")
        added = {one["content"]: one["rstrip"] for one in json.loads(texts["tokenizer.json"])["added_tokens"]}
        assert added["<s>"] is False and added["</s>"] is (architecture == "phi3")


OLD = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
DIGITS = {"type": "Digits", "individual_digits": True}


@pytest.mark.parametrize(
    ("pre_tokenizer", "name"),
    [(OLD, "gpt-2"), ({"type": "Sequence", "pretokenizers": [DIGITS, OLD]}, "smollm")],
)
def test_files_older_than_use_regex(pre_tokenizer, name):
    """As those of GPT-2 and Pythia."""
    definition = json.loads(tokenizer_files()["tokenizer.json"])
    old = Tokenizer(definition | {"pre_tokenizer": pre_tokenizer}, eod_token="<|end|>")
    assert tokenizer_metadata(old, 300)["tokenizer.ggml.pre"] == name


@pytest.mark.parametrize("kind", ["gpt2", "llama2_plain"])
def test_a_normalizer_that_llama_cpp_does_not_have(kind):
    definition = Tokenizer.load(GOLDENS / "tokenizers" / kind).definition
    own = definition.get("normalizer")
    changes = {"type": "Sequence", "normalizers": [*([own] if own else []), {"type": "Lowercase"}]}
    lower = Tokenizer(definition | {"normalizer": changes})
    with pytest.raises(CheckpointError, match="normalizer 'Lowercase', which cannot be written as GGUF"):
        tokenizer_metadata(lower, lower.vocab_size)


def test_a_tokenizer_with_parts_missing(tmp_path):
    tokens = [*BYTE_CHARACTERS, "ab", "<s>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [5],  # <s> is unused
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.add_bos_token": True,
    }
    with pytest.raises(CheckpointError, match=r"a\.gguf: its metadata lack .*merges"):
        tokenizer_texts(metadata, "a.gguf")
    files = tokenizer_texts(metadata | {"tokenizer.ggml.merges": ["a b"]}, "a.gguf")
    assert "bos_token" not in json.loads(files["tokenizer_config.json"])
    assert json.loads(files["tokenizer.json"])["post_processor"] is None


@pytest.mark.parametrize(
    ("name", "key"), [("gpt2", "tokens"), ("llama2_plain", "tokens"), ("llama2_plain", "scores")]
)
def test_a_tokenizer_without_what_its_kind_needs(name, key):
    whole = Tokenizer.load(GOLDENS / "tokenizers" / name)
    metadata = tokenizer_metadata(whole, whole.vocab_size)
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(CheckpointError, match=rf"a\.gguf: its metadata lack tokenizer\.ggml\.{key}$"):
        tokenizer_texts(metadata, "a.gguf")


# ---- where a model is an argument


def test_a_file_is_a_model(tmp_path, llama):
    rewrite(llama, tmp_path / "b.gguf", metadata={"general.sampling.temp": 0.6, "general.sampling.top_k": 7})
    with ExitStack() as stack:
        place = resolve_model(tmp_path / "b.gguf", stack)
        weights = read_ppfleetx(place.checkpoint)
        expected = {"temperature": 0.6, "top_k": 7, "decode_strategy": "sampling"}
        assert expected.items() <= weights.generation.items()
        assert (place.tokenizer / "tokenizer.json").is_file()
    assert not place.checkpoint.exists()
    assert "--from gguf" in described(llama)


def test_the_factors_of_llama_3_are_those_that_llama_cpp_multiplies_by(tmp_path, tokenizer):
    model, tensors = network("llama_tied_3.1")
    write_gguf(tensors, model, tmp_path / "a.gguf", tokenizer=tokenizer)
    stored = {one.name: one.data for one in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    plain = inverse_frequencies(model.head_size, model.rotary_base, None)
    wanted = inverse_frequencies(model.head_size, model.rotary_base, model.rope_scaling)
    np.testing.assert_allclose(plain / stored["rope_freqs.weight"], wanted, rtol=1e-6)
