"""Metadata as llama.cpp's converter writes them, for real models and for odd ones."""

from typing import Any

import numpy as np
import pytest

from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.rope import RopeScalingConfig
from ppfleetx.conversion.gguf_config import BY_TYPE, config_of, metadata_of
from ppfleetx.conversion.huggingface.config_import import model_keys
from tests.conversion.test_gguf import hf_config_of

LAYERS, HEAD = 6, 8
SIZES = {
    "context_length": 64,
    "embedding_length": 32,
    "block_count": LAYERS,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}
RMS = {"attention.layer_norm_rms_epsilon": 1e-6}
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
FACTORS = {
    name: np.arange(1, 5, dtype=np.float32)
    for name in ("rope_factors_long.weight", "rope_factors_short.weight")
}
WINDOW = RMS | {"attention.sliding_window": 8}
PHI3 = RMS | {"rope.scaling.original_context_length": 16, "attention.sliding_window": 0}


def config(
    name: str,
    values: dict[str, Any],
    tensors: tuple[str, ...] = (),
    factors: dict[str, np.ndarray] | None = None,
) -> dict[str, Any]:
    metadata = {f"{name}.{key}": value for key, value in (SIZES | values).items()}
    shapes = dict.fromkeys(("token_embd.weight", *tensors), (260, 32))
    return config_of(metadata | {"general.architecture": name}, shapes, factors or {})


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("llama", RMS | {"attention.sliding_window": 64}, {"attention_window": None}),
        ("granite", RMS, {"attention_multiplier": HEAD**-0.5, "residual_multiplier": 1.0}),
        ("granite", RMS | {"attention.head_count_kv": [2] * LAYERS}, {"num_query_groups": 2}),
        ("gemma2", RMS, {"attn_logit_softcapping": 50.0, "attention_window": 4095}),
        ("gemma2", WINDOW, {"attention_window_layers": (0, 2, 4)}),
        ("gemma3", WINDOW, {"attention_window_layers": (0, 1, 2, 3, 4)}),
        ("gemma3", RMS, {"attention_window": None, "attention_window_layers": None}),
        ("gemma3", RMS | {"attention.sliding_window": 0}, {"attention_window": None}),
        (
            "gemma3",
            WINDOW | {"attention.sliding_window_pattern": 3},
            {"attention_window_layers": (0, 1, 3, 4)},
        ),
        (
            "gemma3",
            WINDOW | {"attention.sliding_window_pattern": [True, *[False] * 5]},
            {"attention_window_layers": (0,)},
        ),
        ("phi3", PHI3, {"attention_window": None, "rotary_percent": 1.0}),
        ("phi3", PHI3 | {"rope.dimension_count": 6}, {"rotary_percent": 0.75}),
        ("llama", RMS | {"rope.scaling.type": "linear"}, {"rope_scaling": None}),
        # Older files give a factor alone.
        (
            "llama",
            RMS | {"rope.scaling.factor": 4.0},
            {"rope_scaling": RopeScalingConfig(type="linear", factor=4)},
        ),
    ],
)
def test_settings(name, values, expected):
    model = ModelConfig(**model_keys(config(name, values)))
    assert {key: getattr(model, key) for key in expected} == expected


@pytest.mark.parametrize("kind", ["none", "longrope"])
def test_longrope(kind):
    scaling = config("phi3", PHI3 | {"rope.scaling.type": kind}, factors=FACTORS)["rope_scaling"]
    assert scaling == {
        "rope_type": "longrope",
        "long_factor": [1, 2, 3, 4],
        "short_factor": [1, 2, 3, 4],
        "attention_factor": 1.0,
    }


def test_a_stablelm_is_parallel_without_a_second_norm():
    """Some files say ``use_parallel_residual`` for every network; llama.cpp looks at the tensors."""
    values = LAYER_NORM | {"use_parallel_residual": True, "rope.dimension_count": 2}
    assert config("stablelm", values)["use_parallel_residual"]
    assert not config("stablelm", values, ("blk.0.ffn_norm.weight",))["use_parallel_residual"]


@pytest.mark.parametrize(
    ("name", "values", "factors", "message"),
    [
        ("llama", RMS | {"expert_count": 8}, {}, "mixture of experts"),
        ("llama", RMS | {"embedding_length": None}, {}, "lack llama.embedding_length"),
        ("llama", {}, {}, "lack llama.attention.layer_norm_rms_epsilon"),
        ("llama", RMS | {"rope.dimension_count": 4}, {}, "whole heads"),
        ("qwen2", WINDOW, {}, "without a sliding window"),
        ("granite", RMS | {"attention.head_count_kv": [2, 0, 2, 2, 2, 2]}, {}, "not the same for all"),
        ("llama", RMS | {"attention.head_count": [4, 4, 2, 4, 4, 4]}, {}, "not the same for all"),
        ("llama", RMS | {"attention.head_count": 0}, {}, "head_count 0 must be an integer of at least 1"),
        ("granite", RMS | {"rope.scaling.finetuned": False}, {}, "without rotary positions"),
        ("llama", RMS | {"rope.scaling.yarn_attn_factor": 0.5}, {}, "yarn_attn_factor 0.5 is not supported"),
        ("llama", RMS, {"rope_freqs.weight": np.full(3, 2, np.float32)}, "each of 4 rotary frequencies"),
        ("gemma3", WINDOW | {"attention.sliding_window_pattern": [True]}, {}, "has 1 values"),
        ("phi3", RMS, FACTORS, "lack phi3.rope.scaling.original_context_length"),
    ],
)  # fmt: skip
def test_what_is_refused(name, values, factors, message):
    with pytest.raises(CheckpointError, match=message):
        config(name, values, factors=factors)


def test_tokens_that_end_an_answer():
    """Files of Gemma and Phi-3 name only the end of the text."""
    tokens = ["<eos>", "a", "<end_of_turn>", "b"]
    metadata = {f"gemma2.{key}": value for key, value in (SIZES | RMS).items()} | {
        "general.architecture": "gemma2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 0,
    }  # fmt: skip
    assert config_of(metadata, {"token_embd.weight": (4, 32)}, {})["eos_token_id"] == [0, 2]
    assert config_of(metadata | {"tokenizer.ggml.eot_token_id": 3}, {"token_embd.weight": (4, 32)}, {})[
        "eos_token_id"
    ] == [0, 3, 2]


def test_numbers_that_llama_cpp_reads_as_floats_are_floats():
    """A ``config.json`` may have them as integers."""
    given = hf_config_of("gemma3_text") | {"rope_local_base_freq": 10000, "final_logit_softcapping": 30}
    made = metadata_of(given, BY_TYPE["gemma3_text"], ModelConfig(**model_keys(given)))
    floats = {key for key, value in made.items() if isinstance(value, float)}
    assert {
        f"gemma3.{key}" for key in ("rope.freq_base_swa", "final_logit_softcapping", "rope.freq_base")
    } <= floats
