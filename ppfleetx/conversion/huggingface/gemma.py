"""Gemma 1, 2 and 3 (text): norms of ``1 + weight``, scaled embeddings, soft limits, windows by layer."""

from __future__ import annotations

import math
from typing import Any

from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.huggingface.family import (
    ATTENTION_BIAS,
    LLAMA_FIXED,
    LLAMA_KEYS,
    LLAMA_NAMES,
    LLAMA_READ,
    PATTERN_READ,
    Config,
    Family,
    hf_pattern,
    llama_like,
    pattern_keys,
    rope_by_kind,
)
from ppfleetx.conversion.huggingface.rope import hf_rope

_TANH = ("gelu_pytorch_tanh", "gelu_new")
_KEYS = LLAMA_KEYS | ATTENTION_BIAS | {"tie_word_embeddings": ("tie_word_embeddings", True)}
_FIXED = LLAMA_FIXED | {"hidden_act": "geglu_tanh", "normalization": "RMSNorm1P"}
_SANDWICH = LLAMA_NAMES | {
    "decoder.layers.{}.attention_post_norm": "model.layers.{}.post_attention_layernorm",
    "decoder.layers.{}.mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
    "decoder.layers.{}.mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
}
_CAPS = {
    "attn_logit_softcapping": ("attn_logit_softcapping", None),
    "final_logit_softcapping": ("final_logit_softcapping", None),
}
_ALL = {"hidden_act", "hidden_activation"}
_SCALED = _ALL | PATTERN_READ | {"query_pre_attn_scalar"}
_ONE_WAY = {"use_bidirectional_attention": (False,)}


def _factors(config: Config) -> dict[str, Any]:
    # Early files say "gelu" in hidden_act, which transformers has always replaced by the tanh form.
    for key, known in (("hidden_activation", _TANH), ("hidden_act", (*_TANH, "gelu"))):
        name = config.get(key, _TANH[0])
        if name not in known:
            raise CheckpointError(f"{key} {shown(name)} of this {config['model_type']} is not supported")
    return {"embedding_multiplier": math.sqrt(config["hidden_size"])}


def _gemma(config: Config) -> dict[str, Any]:
    return llama_like(config) | _factors(config)


def _scale(config: Config, default: float = 256) -> dict[str, Any]:
    return {"attention_multiplier": config.get("query_pre_attn_scalar", default) ** -0.5}


def _gemma2(config: Config) -> dict[str, Any]:
    return _gemma(config) | _scale(config) | pattern_keys({"sliding_window": 4096, **config}, 2)


def _gemma3(config: Config) -> dict[str, Any]:
    every = config.get("_sliding_window_pattern", config.get("sliding_window_pattern", 6))
    pattern = pattern_keys({"sliding_window": 4096, **config}, every)
    rope = rope_by_kind(config, pattern, base=1e6, local=config.get("rope_local_base_freq", 10000.0))
    return _factors(config) | rope | _scale(config) | pattern


def _write(model: ModelConfig) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", **hf_rope(model)}


def _write_scaled(model: ModelConfig) -> dict[str, Any]:
    scale = model.attention_multiplier or model.head_size**-0.5
    return {**_write(model), "query_pre_attn_scalar": scale**-2, **hf_pattern(model)}


def _write_gemma3(model: ModelConfig) -> dict[str, Any]:
    return {**_write_scaled(model), "rope_local_base_freq": model.local_rotary_base or model.rotary_base}


GEMMA: dict[str, Family] = {
    "gemma": Family(
        "GemmaForCausalLM",
        _KEYS,
        _FIXED,
        LLAMA_NAMES,
        _gemma,
        _write,
        LLAMA_READ | _ALL,
        required=("head_dim",),
        off=_ONE_WAY,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _KEYS | _CAPS,
        _FIXED | {"sandwich_norm": True},
        _SANDWICH,
        _gemma2,
        _write_scaled,
        LLAMA_READ | _SCALED,
        required=("head_dim", "num_key_value_heads"),
        off=_ONE_WAY,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _KEYS | _CAPS,
        _FIXED | {"sandwich_norm": True, "qk_layernorm": True},
        _SANDWICH,
        _gemma3,
        _write_gemma3,
        LLAMA_READ | _SCALED | {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"},
        required=("head_dim", "num_key_value_heads"),
        off=_ONE_WAY,
    ),
}
