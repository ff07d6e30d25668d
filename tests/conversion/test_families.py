"""GPT-NeoX, Qwen2, Qwen3 and Mistral, against transformers (recipe: tests/goldens/make_hf_families.py)."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ppfleetx.commands.generate import load_generator
from ppfleetx.commands.main import call
from ppfleetx.config.errors import CheckpointError, ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.root import GenerationConfig, InferenceConfig, RunConfig
from ppfleetx.conversion.compare_logits import our_logits
from ppfleetx.conversion.convert import Conversion, check_logits, convert
from ppfleetx.conversion.huggingface.config_export import hf_config
from ppfleetx.conversion.huggingface.config_import import model_keys
from ppfleetx.conversion.huggingface.directory import read_hf
from ppfleetx.conversion.huggingface.families import FAMILIES
from ppfleetx.conversion.huggingface.tensor_mapping import rules
from ppfleetx.data.tokenizer.json_files import BYTE_CHARACTERS, make_definition
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.deploy.export import check_positions, export
from ppfleetx.deploy.inference_engine import InferenceEngine
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.generation.generator import Generation, Generator
from tests.conversion import hf_dirs
from tests.generation.hf_weights import PROMPTS, random_weight

GOLDENS = Path(__file__).parents[1] / "goldens"
TOLD = json.loads((GOLDENS / "hf_families.json").read_text())
ALL = pytest.mark.parametrize("name", TOLD)
CTX = ParallelContext.single()
GREEDY = {"decode_strategy": "greedy_search", "max_dec_len": 24, "min_dec_len": 24, "eos_token_id": 96}
CLOSE = 5e-5  # of logits of up to 10
CLOSER = {"gemma": 1e-4, "gemma2": 1e-4, "gemma3": 1e-4}  # of logits of up to 20
# What is trained here has no config.json; the network is then written as the first family that has it.
WRITTEN_AS = {
    "mistral_whole": "llama",
    "phi3": "mistral",
    "seed_oss": "qwen2",
    "gpt_bigcode_heads": "gpt2",
    "falcon_serial": "starcoder2",
}


def test_the_help_and_the_page_name_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("convert", ["--help"])
    _, _, listed = capsys.readouterr().out.partition("The model types of --from hf and --to hf:")
    assert re.findall(r"\w+", listed.partition("\n\n")[0]) == list(FAMILIES)
    page = (Path(__file__).parents[2] / "docs/converting.md").read_text()
    table = page.partition("| `model_type` |")[2].partition("\n\n")[0]
    first_cells = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    named = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(FAMILIES)


def logits_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and transformers' logits of them."""
    with np.load(GOLDENS / "hf_families.npz") as stored:
        return stored["tokens"], stored[name]


def write(directory: Path, config: dict) -> Path:
    """A directory with the weights that the recipe makes."""
    directory.mkdir(parents=True)
    parts = {n: shape for rule in rules(config) for n, shape in zip(rule.theirs, rule.shapes, strict=True)}
    tensors = {name: random_weight(name, shape) for name, shape in parts.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def directory_of(root: Path, name: str, **changes: object) -> Path:
    return write(root / "hf", TOLD[name]["config"] | changes)


@ALL
def test_there_and_back(tmp_path, name):
    source = directory_of(tmp_path, name)
    tokens, expected = logits_of(name)
    made = hf_dirs.there_and_back(source, tmp_path, tokens, expected, close=CLOSER.get(name, CLOSE))
    assert made["model_type"] == WRITTEN_AS.get(name, TOLD[name]["config"]["model_type"])


def generator_of(root: Path, name: str) -> tuple[RunConfig, Generator]:
    """A converted model with a tokenizer of 97 ids."""
    source = directory_of(root, name)
    vocab = {character: number for number, character in enumerate([*list(BYTE_CHARACTERS)[:96], "<|end|>"])}
    Tokenizer(make_definition(vocab, [], ["<|end|>"]), eod_token="<|end|>").save(source)
    convert(Conversion("hf", "ppfleetx", source, root / "ours"))
    cfg = config_of(root)
    return cfg, load_generator(cfg, CTX)


def config_of(root: Path, *overrides: str) -> RunConfig:
    """Of the model that was converted into ``root``, which is exported there, too."""
    places = [f"Engine.save_load.ckpt_dir={root / 'ours'}", f"Engine.save_load.output_dir={root / 'out'}"]
    return load_config(root / "ours" / "config.yaml", [*places, "Global.device=cpu", *overrides])


def tokens_of(rows: list[list[Generation]]) -> list[list[int]]:
    return [list(row[0].ids) for row in rows]


@pytest.mark.slow_after(4)
@ALL
def test_greedy_search_gives_transformers_tokens(tmp_path, name):
    """Rows of unequal lengths in one batch, with keys kept and without; each alone with guessed tokens."""
    _, generator = generator_of(tmp_path, name)
    for keys in ({"prompt_lookup_num_tokens": 0}, {"use_cache": False}):
        found = generator.generate(PROMPTS, GenerationConfig(**GREEDY, **keys))
        assert tokens_of(found) == TOLD[name]["ids"], keys
    alone = [generator.generate([one], GenerationConfig(**GREEDY))[0] for one in PROMPTS]
    assert tokens_of(alone) == TOLD[name]["ids"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen3_window", "gemma3", "olmo3", "stablelm_norms", "bloom", "falcon_new", "cohere2", "opt"]
)
def test_an_exported_program_gives_them_too(tmp_path, name):
    """Other blocks as programs are in tests/models/test_export.py."""
    cfg, generator = generator_of(tmp_path, name)
    engine = InferenceEngine(InferenceConfig(model_dir=str(export(cfg, CTX, generator)), cpu_threads=1))
    for guesses in (0, 10):
        options = GenerationConfig(**GREEDY, prompt_lookup_num_tokens=guesses)
        assert tokens_of(engine.generate(PROMPTS, options)) == TOLD[name]["ids"]
        assert tokens_of([engine.generate([one], options)[0] for one in PROMPTS]) == TOLD[name]["ids"]


@pytest.mark.slow
def test_longrope_is_exported_for_short_rows_alone(tmp_path):
    """Where no row becomes long, nothing has to be computed anew."""
    name, longest = "phi3_longrope_up_to_its_length", 24
    cfg, _ = generator_of(tmp_path, name)
    with pytest.raises(ConfigError, match=r"than 24 tokens.*-o Model.max_position_embeddings=24"):
        check_positions(cfg)
    cfg = config_of(tmp_path, f"Model.max_position_embeddings={longest}")
    check_positions(cfg)
    program = export(cfg, CTX, load_generator(cfg, CTX))
    engine = InferenceEngine(InferenceConfig(model_dir=str(program), cpu_threads=1))
    new = longest - max(map(len, PROMPTS))
    options = GenerationConfig(**{**GREEDY, "max_dec_len": new, "min_dec_len": new})
    assert tokens_of(engine.generate(PROMPTS, options)) == [ids[:new] for ids in TOLD[name]["ids"]]


# ---- families whose code is not in transformers: each is another family's network under other names

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
}
OWN_CODE = {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}


def fuse_qkv(tensors: dict[str, np.ndarray], name: str, groups: int) -> dict[str, np.ndarray]:
    """Put q, k and v of each layer into one matrix ``[out, in]`` of ``groups`` of rows."""
    made = dict(tensors)
    for layer in ("model.layers.0.self_attn.", "model.layers.1.self_attn."):
        parts = [made.pop(f"{layer}{part}_proj.weight") for part in "qkv"]
        rows = np.concatenate([part.reshape(groups, -1, 32) for part in parts], axis=1)
        made[f"{layer}{name}.weight"] = rows.reshape(-1, 32)
    return made


INTERNLM2 = {
    "model.embed_tokens": "model.tok_embeddings",
    "self_attn.o_proj": "attention.wo",
    "self_attn.wqkv": "attention.wqkv",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "lm_head": "output",
}


BAICHUAN = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "rope_theta")}


@pytest.mark.parametrize(
    "kind, config, change, names, fused, groups",
    [
        ("internlm2", LLAMA, {}, INTERNLM2, "wqkv", 2),
        ("baichuan", BAICHUAN, {"num_key_value_heads": 4, "rope_theta": 10000.0}, {}, "W_pack", 1),
    ],
)
def test_llamas_under_other_names(tmp_path, kind, config, change, names, fused, groups):
    source = write(tmp_path / "llama", LLAMA | change)
    other = tmp_path / kind
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config | OWN_CODE | {"model_type": kind}))
    tensors = fuse_qkv(load_file(source / "model.safetensors"), fused, groups)
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    tokens, _ = logits_of("neox")
    found, expected = (
        our_logits(weights, ModelConfig(**weights.model), tokens) for weights in map(read_hf, (other, source))
    )
    np.testing.assert_array_equal(found, expected)
    there = Conversion("hf", "ppfleetx", other, tmp_path / "ours")
    convert(there)
    convert(Conversion("ppfleetx", "hf", tmp_path / "ours", tmp_path / "back"))
    after = load_file(tmp_path / "back" / "model.safetensors")
    for name, tensor in load_file(other / "model.safetensors").items():
        np.testing.assert_array_equal(after[name], tensor)


def test_minicpm_is_a_granite_with_other_factors():
    factors = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 8}
    found = model_keys(LLAMA | OWN_CODE | factors | {"model_type": "minicpm", "tie_word_embeddings": True})
    granite = {"embedding_multiplier": 12, "residual_multiplier": 1.4 / 2**0.5, "logits_scaling": 32 / 8}
    granite |= {"attention_multiplier": 8**-0.5, "tie_word_embeddings": True}
    expected = model_keys(LLAMA | granite | {"model_type": "granite"})
    for key, value in found.items():
        assert value == (pytest.approx(expected[key]) if isinstance(value, float) else expected[key]), key


def test_baichuan_13b_has_linear_biases_and_baichuan_2_is_refused():
    config = BAICHUAN | {"model_type": "baichuan", "max_position_embeddings": None}
    found = model_keys(config | {"model_max_length": 128})
    assert (found["position_embedding_type"], found["max_position_embeddings"]) == ("alibi", 128)
    with pytest.raises(CheckpointError, match="Baichuan 2"):
        model_keys(config | {"vocab_size": 125696})


def without(name: str, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in TOLD[name]["config"].items() if key not in keys}


ROPE = ("rope_theta", "rope_parameters", "rope_scaling")
BASES = {"smollm3": 2e6, "cohere": 5e5, "ernie4_5": 5e5, "olmo3": 5e5, "qwen3": 1e4}
EPSILONS = {"glm": 1.5625e-7, "glm4": 1.5625e-7, "olmo2": 1e-5, "qwen3": 1e-6}
QWEN = without("qwen2_window", "layer_types")
QWEN |= {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8}
GEMMA3 = without("gemma3", "layer_types", "rope_parameters")
OLD_NEOX = without("neox", "rope_parameters")
OLD_NEOX |= {"rotary_pct": 0.5, "rotary_emb_base": 500, "rope_scaling": None}


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before: False of this opt"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm: True of this bloom"),
        ("falcon", {"alibi": True}, "alibi: True of this falcon"),
        ("gptj", {"rotary_dim": None}, "rotary_dim None"),
        ("gemma2", {"layer_types": ["sliding_attention"]}, "layer_types .* is not supported"),
        ("gemma", {"hidden_activation": "relu"}, "hidden_activation 'relu' of this gemma"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0 of this gemma3_text"),
        ("smollm3", {"no_rope_layers": [1]}, "is not one number for each layer"),
        (
            "phi3",
            {"rope_scaling": {"type": "su"}, "rope_parameters": None},
            r"rope scaling 'longrope' \(rope_scaling\).*short_factor",
        ),
        ("qwen3", {"layer_types": ["linear_attention"] * 2}, "layer_types .* is not supported"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window is not true"),
        ("mistral", {"sliding_window": 1}, "sliding_window 1 is not supported"),
        ("neox", {"hidden_act": "silu"}, "hidden_act 'silu' of this gpt_neox"),
        ("neox", {"num_attention_heads": 5}, "5 heads do not divide"),
        ("neox", {"num_key_value_heads": 2}, "num_key_value_heads: 2 of this gpt_neox"),
        ("neox", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("qwen2", {"attention_bias": True}, "attention_bias: True of this qwen2"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "whole heads are rotated"),
    ],
)
def test_what_is_another_network_is_refused(name, change, message):
    with pytest.raises(CheckpointError, match=message):
        model_keys(TOLD[name]["config"] | change)


@pytest.mark.parametrize(
    "name, absent",
    [
        ("mistral", "sliding_window"),
        ("mistral", "num_key_value_heads"),
        ("gemma", "num_key_value_heads"),
        ("stablelm", "num_key_value_heads"),
        ("qwen3", "head_dim"),
        ("gemma2", "attn_logit_softcapping"),
        ("gemma2", "final_logit_softcapping"),
    ],
)
def test_values_that_transformers_would_guess_must_be_there(name, absent):
    with pytest.raises(CheckpointError, match=f"config.json lacks {absent}"):
        model_keys(without(name, absent))


@pytest.mark.parametrize(
    "config, key, value",
    [
        # What transformers takes if nothing is given.
        *((without(name, *ROPE), "rotary_base", base) for name, base in BASES.items()),
        *((without(name, "rms_norm_eps"), "norm_epsilon", epsilon) for name, epsilon in EPSILONS.items()),
        (without("neox", "rope_parameters"), "rotary_percent", 0.25),
        # A limit that is null is none.
        (TOLD["gemma2"]["config"] | {"attn_logit_softcapping": None}, "attn_logit_softcapping", None),
        # Of the period's two names, transformers reads one.
        (
            GEMMA3 | {"sliding_window_pattern": 2, "_sliding_window_pattern": 6},
            "attention_window_layers",
            [0],
        ),
        (GEMMA3 | {"_sliding_window_pattern": 2}, "attention_window_layers", [0, 1]),
        (TOLD["gemma2"]["config"] | {"attn_logit_softcapping": None}, "final_logit_softcapping", 30.0),
        # A window as long as the longest sequence is none.
        (TOLD["mistral"]["config"], "attention_window", 3),
        (TOLD["mistral"]["config"] | {"sliding_window": 64}, "attention_window", None),
        (QWEN | {"max_window_layers": 4}, "attention_window", None),
        (QWEN | {"max_window_layers": 0}, "attention_window", 7),
        (QWEN | {"max_window_layers": 1}, "attention_window", 7),
        (TOLD["qwen2"]["config"] | {"sliding_window": 8}, "attention_window", None),
        # The names of transformers 4.
        (OLD_NEOX, "rotary_percent", 0.5),
        (OLD_NEOX, "rotary_base", 500.0),
    ],
)
def test_settings(config, key, value):
    assert model_keys(config)[key] == value


def test_the_quickstarts_model_is_a_gpt_neox():
    made = hf_config(load_config("gpt/pretrain_gpt_tiny").Model, "F32")
    assert made["model_type"] == "gpt_neox" and made["tie_word_embeddings"]
    assert not made["use_parallel_residual"] and made["rotary_pct"] == 1


def test_every_dropout_is_a_number():
    """transformers 5 refuses null. Here it stands for hidden_dropout_prob."""
    keys = model_keys(TOLD["falcon_serial"]["config"]) | {"hidden_dropout_prob": 0.2}
    made = hf_config(ModelConfig(**keys), "F32")
    assert made["model_type"] == "starcoder2" and made["embedding_dropout"] == 0.2


def test_older_files_of_gpt_neox(tmp_path):
    """Masks were stored; the head has two names."""
    source = write(tmp_path / "hf", OLD_NEOX)
    tensors = load_file(source / "model.safetensors")
    masks = ("bias", "masked_bias", "rotary_emb.inv_freq")
    extra = {f"gpt_neox.layers.0.attention.{name}": np.zeros(2, np.float32) for name in masks}
    renamed = {"lm_head.weight": tensors.pop("embed_out.weight"), **tensors, **extra}
    save_file(renamed, source / "model.safetensors", {"format": "pt"})
    there = Conversion("hf", "ppfleetx", source, tmp_path / "ours")
    assert check_logits(there, convert(there)) < CLOSE


@pytest.mark.parametrize(
    "name, prefix, words",
    [
        ("opt", "model.", "decoder.embed_tokens"),
        ("bloom", "transformer.", "word_embeddings"),
        ("falcon", "", "transformer.word_embeddings"),
    ],
)
def test_files_may_omit_the_prefix_and_hold_the_tied_head(tmp_path, name, prefix, words):
    source = directory_of(tmp_path, name)
    tensors = load_file(source / "model.safetensors")
    bare = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
    save_file(bare | {"lm_head.weight": bare[f"{words}.weight"]}, source / "model.safetensors")
    tokens, expected = logits_of(name)
    weights = read_hf(source)
    logits = our_logits(weights, ModelConfig(**weights.model), tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=CLOSE)
    save_file(bare | {"lm_head.weight": bare[f"{words}.weight"] + 1}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match="ties the head to the word embedding, but their values differ"):
        read_hf(source)


def test_a_program_of_its_own_is_not_run(tmp_path):
    weights = read_hf(directory_of(tmp_path, "phi3", **OWN_CODE))
    assert any("its own program (auto_map), which is not run" in note for note in weights.notes)


def test_the_length_of_a_bloom_comes_back(tmp_path):
    """Its key is also one of PaddleNLP's, which are left out."""
    source = directory_of(tmp_path, "bloom", seq_length=64)
    convert(Conversion("hf", "ppfleetx", source, tmp_path / "ours"))
    convert(Conversion("ppfleetx", "hf", tmp_path / "ours", tmp_path / "back"))
    assert json.loads((tmp_path / "back/config.json").read_text())["seq_length"] == 64


def test_of_paddle_only_llamas_are_read(tmp_path):
    source = directory_of(tmp_path, "qwen2")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors, source / "model.safetensors", {"format": "np"})
    with pytest.raises(CheckpointError, match="is a qwen2 that PaddleNLP or PaddleFormers wrote"):
        convert(Conversion("hf", "ppfleetx", source, tmp_path / "ours"))
