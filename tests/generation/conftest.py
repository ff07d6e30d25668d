"""Small models and a tokenizer the generation tests share."""

from collections.abc import Callable

import pytest

from ppfleetx.config.sections import ModelConfig
from ppfleetx.data.tokenizer import Tokenizer
from ppfleetx.data.tokenizer_training import train_tokenizer
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.models.staged import StagedModel
from ppfleetx.nn.factory import LocalFactory

GPT2_STYLE = {"num_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
LLAMA_STYLE = {
    "num_layers": 2,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "hidden_size": 48,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "hidden_act": "swiglu",
    "tie_word_embeddings": False,
    "add_bias_linear": False,
}
MakeModel = Callable[..., tuple[StagedModel, ModelConfig]]


@pytest.fixture(params=["gpt2_style", "llama_style"])
def style(request: pytest.FixtureRequest) -> dict:
    return {"gpt2_style": GPT2_STYLE, "llama_style": LLAMA_STYLE}[request.param]


@pytest.fixture
def make_model() -> MakeModel:
    """``make_model(**Model keys)``: random weights large enough that the likeliest token changes often.

    Dropout probabilities stay at their defaults: generation must switch dropout off itself.
    """

    def make(**keys: object) -> tuple[StagedModel, ModelConfig]:
        defaults = {"vocab_size": 61, "max_position_embeddings": 64, "initializer_range": 0.3}
        cfg = ModelConfig(**{**defaults, **GPT2_STYLE, **keys})
        return StagedModel(gpt_stages(cfg, LocalFactory()), seed=5), cfg

    return make


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """256 bytes, some merges, and the end-of-text token last."""
    return train_tokenizer(["the cat and the hat and the other cat"] * 3, 300)
