"""Small models and a tokenizer the generation tests share."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ppfleetx.config.sections.root import ModelConfig
from ppfleetx.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from ppfleetx.models.staged_model import StagedModel
from tests.models.gpt_builders import build, save_network

GPT2_STYLE = {"num_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
LLAMA_STYLE = {
    "num_layers": 2,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "hidden_size": 48,
    "position_embedding_type": "rope",
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0},
    "normalization": "RMSNorm",
    "hidden_act": "swiglu",
    "tie_word_embeddings": False,
    "add_bias_linear": False,
}
DEEPSEEK_STYLE = {
    **{key: value for key, value in LLAMA_STYLE.items() if key != "num_query_groups"},
    "rotary_interleaved": True,
    "latent_attention": {
        "q_rank": 20,
        "kv_rank": 14,
        "rope_head_dim": 6,
        "nope_head_dim": 5,
        "value_head_dim": 7,
    },
    "moe": {
        "num_experts": 6,
        "top_k": 2,
        "expert_ffn_size": 20,
        "first_dense_layers": 1,
        "router": {"score": "sigmoid", "bias": True, "num_groups": 3, "top_groups": 2, "scale": 1.5},
        "shared_experts": {"ffn_size": 24},
    },
}
# Rows of more than 12 tokens have other angles.
LONGROPE_STYLE = {
    **LLAMA_STYLE,
    "rope_scaling": {
        "type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 12,
        "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [3.0, 2.0, 6.0, 1.0],
    },
}
STYLES = {"gpt2_style": GPT2_STYLE, "llama_style": LLAMA_STYLE, "deepseek_style": DEEPSEEK_STYLE}
MakeModel = Callable[..., tuple[StagedModel, ModelConfig]]


RUN_MODEL = {**GPT2_STYLE, "vocab_size": 300, "max_position_embeddings": 64}


def write_run(directory: Path, tokenizer: Tokenizer, **keys: object) -> None:
    """An output directory ``run`` with one checkpoint, a pretraining and a generation YAML, a tokenizer."""
    model_keys = {**RUN_MODEL, **keys}
    cfg = ModelConfig(**model_keys, initializer_range=0.3)
    fingerprints = {"tokenizer": tokenizer.fingerprint}
    save_network(directory / "run", build(cfg, 5), vocab_size=300, fingerprints=fingerprints)
    tokenizer.save(directory / "run" / "tokenizer")
    sections = {"Global": {"device": "cpu", "local_batch_size": 2}, "Model": model_keys}
    (directory / "pretrain.yaml").write_text(json.dumps(sections))
    module = {"Model": {**model_keys, "module": "GPTGenerationModule"}, "Generation": {"max_dec_len": 8}}
    (directory / "generation.yaml").write_text(json.dumps({**sections, **module}))


@pytest.fixture(params=STYLES)
def style(request: pytest.FixtureRequest) -> dict:
    return STYLES[request.param]


@pytest.fixture
def make_model() -> MakeModel:
    """``make_model(**Model keys)``: random weights large enough that the likeliest token changes often.
    Dropout is off."""

    def make(**keys: object) -> tuple[StagedModel, ModelConfig]:
        defaults = {"vocab_size": 61, "max_position_embeddings": 64, "initializer_range": 0.3}
        cfg = ModelConfig(**{**defaults, **GPT2_STYLE, **keys})
        model = build(cfg, 5)
        model.eval()
        return model, cfg

    return make


@pytest.fixture
def model(make_model: MakeModel, style: dict) -> StagedModel:
    return make_model(**style)[0]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """256 bytes, some merges, and the end-of-text token last."""
    return train_tokenizer(["the cat and the hat and the other cat"] * 3, 300)
