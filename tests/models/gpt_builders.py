"""Small models for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ppfleetx.checkpoint.manager import save_checkpoint
from ppfleetx.checkpoint.state_dict import model_slices
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.nn.stage import canonical_parameters

GOLDENS = Path(__file__).parents[1] / "goldens"

LLAMA_STYLE = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "hidden_act": "swiglu",
    "num_query_groups": 2,
    "tie_word_embeddings": False,
    "add_bias_linear": False,
}
VARIANTS = {
    "gpt2": {},
    "llama": LLAMA_STYLE,
    "mqa_sandwich_relu2": {"sandwich_norm": True, "num_query_groups": 1, "hidden_act": "relu2"},
    "neox": {"position_embedding_type": "rope", "rotary_percent": 0.5, "parallel_residual": True},
    "qwen3": {**LLAMA_STYLE, "qk_layernorm": True, "head_dim": 16},
    "command_r": {"normalization": "LayerNormNoBias", "qk_layernorm": "each_head", "num_query_groups": 2},
    "window_normed_heads": {"qk_layernorm": True, "attention_window": 5},
    "latent": {
        **{key: value for key, value in LLAMA_STYLE.items() if key != "num_query_groups"},
        "latent_attention": {
            "q_rank": 10,
            "kv_rank": 9,
            "rope_head_dim": 4,
            "nope_head_dim": 5,
            "value_head_dim": 7,
        },
    },
    "no_positions_wide_heads": {"position_embedding_type": "none", "head_dim": 16, "add_qkv_bias": False},
}


def tiny_config(**keys: Any) -> ModelConfig:
    """Two layers, hidden size 32, 61 tokens padded to 64, no dropout by default."""
    defaults = {
        "vocab_size": 61,
        "vocab_size_divisible_unit": 64,
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 24,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return ModelConfig(**(defaults | keys))


def build(cfg: ModelConfig, seed: int = 1) -> StagedModel:
    return StagedModel(gpt_stages(cfg, LocalFactory()), seed=seed)


def save_network(directory: Path, network: StagedModel, **about: Any) -> Path:
    """A checkpoint of the network as step 4 of a run leaves it, but for what ``about`` says."""
    named = ((parameter.info.name, parameter) for parameter in network.parameters())
    state = {"train": {"step": 4, "epoch": 0, "consumed_samples": 32}}
    step = {"epoch": 0, "step": 4, "state": state, "tensors": model_slices(named)}
    return save_checkpoint(directory, **{**step, **about})


def random_tokens(batch: int = 2, length: int = 12, vocab: int = 61) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng(5).integers(0, vocab, (batch, length)))


def load_golden(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with np.load(GOLDENS / f"{name}.npz") as archive:
        arrays = {key: archive[key] for key in archive.files}
    return json.loads(str(arrays.pop("config"))), arrays


def assign(model: StagedModel, name: str, values: np.ndarray) -> None:
    """Set a parameter; vocabulary padding keeps its initial values."""
    parameter = canonical_parameters(model)[name]
    whole = parameter.numpy()
    whole[tuple(slice(0, size) for size in values.shape)] = values
    parameter.set_value(whole)


class GrowingCache:
    """The simplest key/value cache: concatenation."""

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[paddle.Tensor, paddle.Tensor]] = {}

    @property
    def length(self) -> int:
        return self.pairs[0][0].shape[2] if self.pairs else 0

    def update(
        self, layer_index: int, key: paddle.Tensor, value: paddle.Tensor, window: int | None = None
    ) -> tuple[paddle.Tensor, paddle.Tensor, None]:
        if layer_index in self.pairs:
            past_key, past_value = self.pairs[layer_index]
            key, value = paddle.concat([past_key, key], axis=2), paddle.concat([past_value, value], axis=2)
        self.pairs[layer_index] = (key, value)
        return key, value, None


def logits_of(model: StagedModel, tokens: paddle.Tensor, **inputs: Any) -> np.ndarray:
    """Logits ``[b, s, V]``, without gradients."""
    with paddle.no_grad():
        return model(tokens, **inputs).transpose([1, 0, 2]).numpy()


def logits_in_pieces(
    model: StagedModel,
    tokens: paddle.Tensor,
    widths: Sequence[int],
    cache: GrowingCache | None = None,
    **inputs: paddle.Tensor,
) -> np.ndarray:
    """The logits of a pass that is cut into pieces of these widths; a cache carries each to the next."""
    cache, parts, start = cache or GrowingCache(), [], 0
    for width in widths:
        piece = slice(start, start + width)
        own = {name: tensor[:, piece] for name, tensor in inputs.items()}
        parts.append(logits_of(model, tokens[:, piece], cache=cache, **own))
        start += width
    return np.concatenate(parts, axis=1)
