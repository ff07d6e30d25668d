"""The supported networks of Hugging Face. Each row maps keys of ``config.json`` and names of tensors to ours.

To add a network, add a :class:`Family` to :data:`FAMILIES`.
"""

from __future__ import annotations

from typing import Any

from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.huggingface.family import (
    ATTENTION_BIAS,
    GPT2_ALIASES,
    GPT2_FIXED,
    GPT2_NAMES,
    GPT2_SIZES,
    LLAMA_FIXED,
    LLAMA_KEYS,
    LLAMA_NAMES,
    LLAMA_READ,
    ROPE,
    SILU,
    SIZES,
    Config,
    Family,
    activation,
    activation_name,
    check_heads,
    hf_pattern,
    hf_window,
    llama_like,
    pattern_keys,
    window_keys,
    write_llama,
)
from ppfleetx.conversion.huggingface.gemma import GEMMA
from ppfleetx.conversion.huggingface.gpt_kin import GPT_KIN
from ppfleetx.conversion.huggingface.llama_kin import LLAMA_KIN
from ppfleetx.conversion.huggingface.mixtures import MIXTURES
from ppfleetx.conversion.huggingface.rope import hf_neox_rope, rope_keys

# ---- GPT-2

_GPT2 = Family(
    "GPT2LMHeadModel",
    GPT2_SIZES,
    GPT2_FIXED,
    GPT2_NAMES,
    read=lambda config: activation(config, "activation_function", "gelu_new"),
    write=lambda model: {
        "activation_function": activation_name(model),
        "embd_pdrop": model.embedding_dropout,
    },
    also_read={"activation_function"},
    aliases=GPT2_ALIASES,
    has_in_out_linears=True,
    has_parts_in_a_row=True,
    off={
        "scale_attn_by_inverse_layer_idx": (False,),
        "scale_attn_weights": (True,),
        "position_embedding_type": ("absolute", "learned"),
    },
)

# ---- Llama and its relatives


def _mistral(config: Config) -> dict[str, Any]:
    return llama_like(config) | window_keys(config, config.get("sliding_window"))


def _qwen(config: Config) -> dict[str, Any]:
    return llama_like(config) | _qwen_window(config)


def _qwen_window(config: Config) -> dict[str, Any]:
    """The window, and the layers with a window unless all layers have it."""
    layers, first = config["num_hidden_layers"], config.get("max_window_layers", 28)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    kinds = [_KINDS[window is not None and layer >= first] for layer in range(layers)]
    if window is None and "sliding_attention" in config.get("layer_types", ()):
        raise CheckpointError(
            "config.json: layer_types has sliding_attention, and use_sliding_window is not true"
        )
    keys = pattern_keys({"layer_types": kinds, **config, "sliding_window": window}, layers)
    if len(keys.get("attention_window_layers", ())) in (0, layers):
        return window_keys(config, window if keys["attention_window"] else None)
    return keys


_KINDS = ("full_attention", "sliding_attention")


def _write_mistral(model: ModelConfig) -> dict[str, Any]:
    return {**write_llama(model), "sliding_window": hf_window(model)}


def _write_qwen(model: ModelConfig) -> dict[str, Any]:
    window = hf_window(model)
    made = {**write_llama(model), "use_sliding_window": window is not None, "sliding_window": window}
    return made if window is None else made | hf_pattern(model) | {"max_window_layers": 0}


_QWEN_READ = LLAMA_READ | {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
# ---- GPT-NeoX


def _neox(config: Config) -> dict[str, Any]:
    check_heads(config)
    return {**activation(config, "hidden_act", "gelu"), **rope_keys(config)}


_NEOX = Family(
    "GPTNeoXForCausalLM",
    keys={
        **SIZES,
        "layer_norm_eps": ("norm_epsilon", 1e-5),
        "hidden_dropout": ("hidden_dropout_prob", 0.0),
        "attention_bias": ("add_qkv_bias add_out_proj_bias", True),
        "use_parallel_residual": ("parallel_residual", True),
        "tie_word_embeddings": ("tie_word_embeddings", False),
    },
    fixed={
        "position_embedding_type": "rope",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "add_mlp_bias": True,
    },
    names={
        "embedding.word_embeddings": "gpt_neox.embed_in",
        "decoder.layers.{}.input_norm": "gpt_neox.layers.{}.input_layernorm",
        "decoder.layers.{}.attention.qkv": "gpt_neox.layers.{}.attention.query_key_value",
        "decoder.layers.{}.attention.out_proj": "gpt_neox.layers.{}.attention.dense",
        "decoder.layers.{}.mlp_norm": "gpt_neox.layers.{}.post_attention_layernorm",
        "decoder.layers.{}.mlp.fc1": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "decoder.layers.{}.mlp.fc2": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
        "decoder.final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    read=_neox,
    write=lambda model: {"hidden_act": activation_name(model), **hf_neox_rope(model)},
    also_read=ROPE | {"hidden_act", "rotary_pct", "rotary_emb_base"},
)

_DENSE: dict[str, Family] = {
    "gpt2": _GPT2,
    "llama": Family(
        "LlamaForCausalLM",
        LLAMA_KEYS | ATTENTION_BIAS | {"mlp_bias": ("add_mlp_bias", False)},
        LLAMA_FIXED,
        LLAMA_NAMES,
        llama_like,
        write_llama,
        LLAMA_READ,
        off=SILU,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        LLAMA_KEYS,
        LLAMA_FIXED | {"add_qkv_bias": True},
        LLAMA_NAMES,
        _qwen,
        _write_qwen,
        _QWEN_READ,
        required=("num_key_value_heads",),
        off=SILU,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        LLAMA_KEYS | ATTENTION_BIAS,
        LLAMA_FIXED | {"qk_layernorm": True},
        LLAMA_NAMES,
        _qwen,
        _write_qwen,
        _QWEN_READ,
        required=("num_key_value_heads", "head_dim"),
        off=SILU,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        LLAMA_KEYS,
        LLAMA_FIXED,
        LLAMA_NAMES,
        _mistral,
        _write_mistral,
        LLAMA_READ | {"sliding_window"},
        required=("num_key_value_heads", "sliding_window"),
        off=SILU,
    ),
    "gpt_neox": _NEOX,
    **GEMMA,
    **LLAMA_KIN,
    **GPT_KIN,
}

FAMILIES = _DENSE | MIXTURES
"""All families by ``model_type``."""


def candidates(model: ModelConfig) -> dict[str, Family]:
    """The families to try for a network. It is written as the first one that can express it."""
    return _DENSE if model.moe is None else MIXTURES
