"""GPT-NeoX, Qwen2, Qwen3 and Mistral, against transformers (recipe: tests/goldens/make_hf_families.py)."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ppfleetx.checkpoint.weights import fitted
from ppfleetx.checkpoint.weights_only import read_ppfleetx
from ppfleetx.commands.generate import load_generator
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.root import GenerationConfig, InferenceConfig, RunConfig
from ppfleetx.conversion.convert import Conversion, check_logits, convert
from ppfleetx.conversion.huggingface.config_export import hf_config
from ppfleetx.conversion.huggingface.config_keys import model_keys
from ppfleetx.conversion.huggingface.directory import read_hf, write_hf
from ppfleetx.conversion.huggingface.tensors import rules
from ppfleetx.conversion.logits import our_logits
from ppfleetx.data.tokenizer.files import BYTE_CHARACTERS, make_definition
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.deploy.export import export
from ppfleetx.deploy.inference_engine import InferenceEngine
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.generation.generator import Generation, Generator
from tests.generation.hf_weights import PROMPTS, random_weight

GOLDENS = Path(__file__).parents[1] / "goldens"
TOLD = json.loads((GOLDENS / "hf_families.json").read_text())
ALL = pytest.mark.parametrize("name", TOLD)
CTX = ParallelContext.single()
GREEDY = {"decode_strategy": "greedy_search", "max_dec_len": 24, "min_dec_len": 24, "eos_token_id": 96}
CLOSE = 5e-5  # of logits of up to 10


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
    config = TOLD[name]["config"]
    there = Conversion("hf", "ppfleetx", source, tmp_path / "ours")
    assert check_logits(there, convert(there)) < CLOSE
    weights = read_ppfleetx(tmp_path / "ours")
    model = ModelConfig(**weights.model)
    np.testing.assert_allclose(our_logits(weights, model, tokens), expected, rtol=0, atol=CLOSE)

    back = Conversion("ppfleetx", "hf", tmp_path / "ours", tmp_path / "back")
    convert(back)
    assert check_logits(back, tmp_path / "back") < CLOSE
    found, tensors = (load_file(place / "model.safetensors") for place in (tmp_path / "back", source))
    assert found.keys() == tensors.keys()
    for key, value in found.items():
        np.testing.assert_array_equal(value, tensors[key], err_msg=key)
    after = json.loads((tmp_path / "back" / "config.json").read_text())
    for key in config.keys() - {"dtype", "torch_dtype"}:
        assert after[key] == config[key], key

    # What is trained here has no config.json: one is made.
    write_hf(fitted(weights, model), model, tmp_path / "made")
    made = json.loads((tmp_path / "made" / "config.json").read_text())
    no_window = {"attention_window": None}
    assert no_window | model_keys(made) == no_window | model_keys(config)
    # A Mistral without a window is a Llama.
    assert made["model_type"] == ("llama" if name == "mistral_whole" else config["model_type"])
    again = read_hf(tmp_path / "made")
    found = our_logits(again, ModelConfig(**again.model), tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE)


def generator_of(root: Path, name: str) -> tuple[RunConfig, Generator]:
    """A converted model with a tokenizer of 97 ids."""
    source = directory_of(root, name)
    vocab = {character: number for number, character in enumerate([*list(BYTE_CHARACTERS)[:96], "<|end|>"])}
    Tokenizer(make_definition(vocab, [], ["<|end|>"]), eod_token="<|end|>").save(source)
    convert(Conversion("hf", "ppfleetx", source, root / "ours"))
    overrides = [f"Engine.save_load.ckpt_dir={root / 'ours'}", "Global.device=cpu"]
    cfg = load_config(
        root / "ours" / "config.yaml", [*overrides, f"Engine.save_load.output_dir={root / 'out'}"]
    )
    return cfg, load_generator(cfg, CTX)


def tokens_of(rows: list[list[Generation]]) -> list[list[int]]:
    return [list(row[0].ids) for row in rows]


@ALL
def test_greedy_search_gives_transformers_tokens(tmp_path, name):
    """Rows of unequal lengths in one batch, with keys kept and without; each alone with guessed tokens."""
    _, generator = generator_of(tmp_path, name)
    for keys in ({"prompt_lookup_num_tokens": 0}, {"use_cache": False}):
        found = generator.generate(PROMPTS, GenerationConfig(**GREEDY, **keys))
        assert tokens_of(found) == TOLD[name]["ids"], keys
    alone = [generator.generate([one], GenerationConfig(**GREEDY))[0] for one in PROMPTS]
    assert tokens_of(alone) == TOLD[name]["ids"]


def test_an_exported_program_gives_them_too(tmp_path):
    """With normalised heads and a window; other blocks as programs are in tests/models/test_export.py."""
    name = "qwen3_window"
    cfg, generator = generator_of(tmp_path, name)
    engine = InferenceEngine(InferenceConfig(model_dir=str(export(cfg, CTX, generator)), cpu_threads=1))
    for guesses in (0, 10):
        options = GenerationConfig(**GREEDY, prompt_lookup_num_tokens=guesses)
        assert tokens_of(engine.generate(PROMPTS, options)) == TOLD[name]["ids"]
        assert tokens_of([engine.generate([one], options)[0] for one in PROMPTS]) == TOLD[name]["ids"]


QWEN = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8, "layer_types": None}


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("qwen2_window", {**QWEN, "max_window_layers": 1}, "3 of 4 layers have a window of 8 tokens"),
        ("qwen3", {"layer_types": ["linear_attention"] * 2}, "layer_types .* is not supported"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window is not true"),
        ("mistral", {"sliding_window": 1}, "sliding_window 1 is not supported"),
        ("mistral", {"sliding_window": 2.5}, "sliding_window = 2.5"),
        ("neox", {"rotary_pct": 1.5, "rope_parameters": None}, "rotary_pct = 1.5"),
        ("neox", {"hidden_act": "silu"}, "hidden_act 'silu' of this gpt_neox"),
        ("neox", {"num_attention_heads": 5}, "5 heads do not divide"),
        ("neox", {"num_key_value_heads": 2}, "num_key_value_heads: 2 of this gpt_neox"),
        ("neox", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("qwen2", {"attention_bias": True}, "attention_bias: True of this qwen2"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "whole heads are turned"),
    ],
)
def test_what_is_another_network_is_refused(name, change, message):
    with pytest.raises(CheckpointError, match=message):
        model_keys(TOLD[name]["config"] | change)


@pytest.mark.parametrize(
    "name, absent",
    [("mistral", "sliding_window"), ("mistral", "num_key_value_heads"), ("qwen3", "head_dim")],
)
def test_sizes_that_transformers_would_guess_must_be_there(name, absent):
    config = dict(TOLD[name]["config"])
    del config[absent]
    with pytest.raises(CheckpointError, match=f"config.json lacks {absent}"):
        model_keys(config)


@pytest.mark.parametrize(
    "name, change, window",
    [
        ("mistral", {}, 3),
        ("mistral", {"sliding_window": 64}, None),  # as long as the longest sequence
        ("qwen2_window", {**QWEN, "max_window_layers": 4}, None),
        ("qwen2_window", {**QWEN, "max_window_layers": 0}, 7),
        ("qwen2_window", {**QWEN, "max_window_layers": 1, "max_position_embeddings": 8}, None),
        ("qwen2", {"sliding_window": 8}, None),
    ],
)
def test_windows(name, change, window):
    assert model_keys(TOLD[name]["config"] | change)["attention_window"] == window


def test_the_quickstarts_model_is_a_gpt_neox():
    made = hf_config(load_config("gpt/pretrain_gpt_tiny").Model, "F32")
    assert made["model_type"] == "gpt_neox" and made["tie_word_embeddings"]
    assert not made["use_parallel_residual"] and made["rotary_pct"] == 1


def test_older_files_of_gpt_neox(tmp_path):
    """transformers 4 has names of its own for rotary positions; masks were stored; the head has two names."""
    config = {key: value for key, value in TOLD["neox"]["config"].items() if key != "rope_parameters"}
    assert model_keys(config)["rotary_percent"] == 0.25
    older = config | {"rotary_pct": 0.5, "rotary_emb_base": 500, "rope_scaling": None}
    assert {"rotary_percent": 0.5, "rotary_base": 500.0}.items() <= model_keys(older).items()
    source = write(tmp_path / "hf", older)
    tensors = load_file(source / "model.safetensors")
    masks = ("bias", "masked_bias", "rotary_emb.inv_freq")
    extra = {f"gpt_neox.layers.0.attention.{name}": np.zeros(2, np.float32) for name in masks}
    renamed = {"lm_head.weight": tensors.pop("embed_out.weight"), **tensors, **extra}
    save_file(renamed, source / "model.safetensors", {"format": "pt"})
    there = Conversion("hf", "ppfleetx", source, tmp_path / "ours")
    assert check_logits(there, convert(there)) < CLOSE


def test_of_paddle_only_llamas_are_read(tmp_path):
    source = directory_of(tmp_path, "qwen2")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors, source / "model.safetensors", {"format": "np"})
    with pytest.raises(CheckpointError, match="is a qwen2 that PaddleNLP or PaddleFormers wrote"):
        convert(Conversion("hf", "ppfleetx", source, tmp_path / "ours"))
