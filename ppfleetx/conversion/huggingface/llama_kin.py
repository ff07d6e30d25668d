"""Relatives of Llama, with gated MLPs without biases, rotary positions, and RMSNorm or LayerNorm."""

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
    SILU,
    Config,
    Family,
    hf_pattern,
    hf_rope_by_kind,
    hf_window,
    llama_like,
    pattern_keys,
    rope_by_kind,
    window_keys,
    write_llama,
)
from ppfleetx.conversion.huggingface.rope import hf_partial_rope

_ROW = "decoder.layers.{}."
_GATE_AND_UP = {f"{_ROW}mlp.fc1": "model.layers.{}.mlp.gate_up_proj"}
_TIED = {"tie_word_embeddings": ("tie_word_embeddings", True)}


def _with_epsilon(name: str) -> dict[str, Any]:
    """Llama's keys, with another name for the epsilon of the norms."""
    return {key: row for key, row in LLAMA_KEYS.items() if key != "rms_norm_eps"} | {
        name: ("norm_epsilon", 1e-5)
    }


def _norms_of_heads(theirs: Any) -> Any:
    """Our ``qk_layernorm`` for families that have a separate gain for each head."""
    return "each_head" if theirs is True else theirs


def _write_partial(model: ModelConfig) -> dict[str, Any]:
    return {"hidden_act": "silu", **hf_partial_rope(model)}


# ---- Granite and MiniCPM: factors


def _granite(config: Config) -> dict[str, Any]:
    return {**llama_like(config), "logits_multiplier": 1 / config.get("logits_scaling", 1.0)}


def _minicpm(config: Config) -> dict[str, Any]:
    keys = llama_like(config) | {"embedding_multiplier": config.get("scale_emb", 1)}
    keys["residual_multiplier"] = config.get("scale_depth", 1) / math.sqrt(config["num_hidden_layers"])
    if "dim_model_base" in config:
        keys["logits_multiplier"] = config["dim_model_base"] / config["hidden_size"]
    return keys


def _write_minicpm(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama(model),
        "scale_emb": model.embedding_multiplier,
        "scale_depth": model.residual_multiplier * math.sqrt(model.num_layers),
        "dim_model_base": model.logits_factor * model.hidden_size,
    }


# ---- Cohere: attention and MLP in parallel behind one norm without a bias

_COHERE_FIXED = LLAMA_FIXED | {
    "normalization": "LayerNormNoBias",
    "parallel_residual": True,
    "shared_input_norm": True,
    "rotary_interleaved": True,
}
_COHERE_KEYS = _with_epsilon("layer_norm_eps") | ATTENTION_BIAS | _TIED
_COHERE_KEYS["logit_scale"] = ("logits_multiplier", 0.0625)


def _cohere(config: Config) -> dict[str, Any]:
    return llama_like(config) | {"qk_layernorm": _norms_of_heads(config.get("use_qk_norm", False))}


def _write_cohere(model: ModelConfig) -> dict[str, Any]:
    return {**write_llama(model), "use_qk_norm": model.qk_layernorm == "each_head"}


def _cohere2(config: Config) -> dict[str, Any]:
    """Only layers with a window have rotary positions; the others have no positions."""
    every = config.get("_sliding_window_pattern", config.get("sliding_window_pattern", 4))
    pattern = pattern_keys({"sliding_window": 4096, **config}, every)
    return llama_like(config) | pattern | {"rotary_layers": pattern.get("attention_window_layers", ())}


# ---- GLM


def _glm_names(*, sandwich: bool) -> dict[str, str]:
    norms = {
        f"{_ROW}attention_post_norm": "model.layers.{}.post_self_attn_layernorm",
        f"{_ROW}mlp_post_norm": "model.layers.{}.post_mlp_layernorm",
    }
    return LLAMA_NAMES | _GATE_AND_UP | (norms if sandwich else {})


def _glm(architecture: str, *, sandwich: bool) -> Family:
    return Family(
        architecture,
        LLAMA_KEYS | {"attention_bias": ("add_qkv_bias", True)},
        LLAMA_FIXED | {"rotary_interleaved": True, "sandwich_norm": sandwich},
        _glm_names(sandwich=sandwich),
        llama_like,
        _write_partial,
        LLAMA_READ,
        has_parts_in_a_row=True,
        required=("num_key_value_heads", "head_dim"),
        off=SILU,
    )


# ---- StableLM, Phi-3, SmolLM3


_STABLELM_HEADS = {
    f"{_ROW}attention.q_norm": "model.layers.{}.self_attn.q_layernorm.norms.{part}",
    f"{_ROW}attention.k_norm": "model.layers.{}.self_attn.k_layernorm.norms.{part}",
}


def _stablelm(config: Config) -> dict[str, Any]:
    is_parallel = config.get("use_parallel_residual", False)
    order = {"parallel_residual": is_parallel, "shared_input_norm": is_parallel}
    return llama_like(config) | order | {"qk_layernorm": _norms_of_heads(config.get("qk_layernorm", False))}


def _write_stablelm(model: ModelConfig) -> dict[str, Any]:
    norms = {"qk_layernorm": model.qk_layernorm == "each_head"}
    return {**_write_partial(model), "use_parallel_residual": model.parallel_residual, **norms}


def _phi3(config: Config) -> dict[str, Any]:
    return llama_like(config) | window_keys(config, config.get("sliding_window"))


def _write_phi3(model: ModelConfig) -> dict[str, Any]:
    dropout = {"embd_pdrop": model.embedding_dropout}
    return {**_write_partial(model), "sliding_window": hf_window(model), **dropout}


def _smollm3(config: Config) -> dict[str, Any]:
    layers, every = config["num_hidden_layers"], config.get("no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers") or [(layer + 1) % every for layer in range(layers)]
    if len(rotates) != layers:
        raise CheckpointError(
            f"config.json: no_rope_layers {shown(rotates)} is not one number for each layer"
        )
    turning = [layer for layer, rotate in enumerate(rotates) if rotate]
    return llama_like(config) | ({} if len(turning) == layers else {"rotary_layers": turning})


def _write_smollm3(model: ModelConfig) -> dict[str, Any]:
    rotates = [int(model.rotates_in(layer)) for layer in range(model.num_layers)]
    return {**write_llama(model), "no_rope_layers": rotates}


# ---- OLMo: norms of what branches add, and of all queries and keys of a layer

_OLMO_FIXED = LLAMA_FIXED | {"qk_layernorm": "all_heads", "sandwich_norm": True, "pre_norm": False}
_OLMO_NAMES = LLAMA_NAMES | {
    f"{_ROW}attention_post_norm": "model.layers.{}.post_attention_layernorm",
    f"{_ROW}mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
}
_OLMO_KEYS = LLAMA_KEYS | ATTENTION_BIAS | {"rms_norm_eps": ("norm_epsilon", 1e-5)}


def _olmo3(config: Config) -> dict[str, Any]:
    base = config.get("rope_theta", 5e5)
    pattern = pattern_keys({"sliding_window": 4096, **config}, 4)
    return rope_by_kind(config, pattern, base=base, local=base) | pattern


def _write_olmo3(model: ModelConfig) -> dict[str, Any]:
    return {"hidden_act": "silu", **hf_rope_by_kind(model), **hf_pattern(model)}


# ---- InternLM 2 and Baichuan, whose code is not in transformers

_OWN_CODE = {"auto_map"}
_INTERNLM2_NAMES = {
    "embedding.word_embeddings": "model.tok_embeddings",
    f"{_ROW}input_norm": "model.layers.{}.attention_norm",
    f"{_ROW}attention.qkv": "model.layers.{}.attention.wqkv",
    f"{_ROW}attention.out_proj": "model.layers.{}.attention.wo",
    f"{_ROW}mlp_norm": "model.layers.{}.ffn_norm",
    f"{_ROW}mlp.fc1": "model.layers.{}.feed_forward.{part}",
    f"{_ROW}mlp.fc2": "model.layers.{}.feed_forward.w2",
    "decoder.final_norm": "model.norm",
    "head": "output",
}


def _baichuan(config: Config) -> dict[str, Any]:
    """7B has rotary positions; 13B has linear biases, and no ``max_position_embeddings``."""
    if config.get("vocab_size", 0) > 100_000:
        raise CheckpointError(
            "this is a Baichuan 2, which normalises the rows of its head at each pass; that is not built"
        )
    if "max_position_embeddings" in config:
        return llama_like(config)
    longest = config.get("model_max_length", 4096)
    return {"position_embedding_type": "alibi", "max_position_embeddings": longest}


def _write_baichuan(model: ModelConfig) -> dict[str, Any]:
    length = "model_max_length" if model.positions.biases else "max_position_embeddings"
    return {"hidden_act": "silu", length: model.max_position_embeddings}


LLAMA_KIN: dict[str, Family] = {
    "granite": Family(
        "GraniteForCausalLM",
        {
            **LLAMA_KEYS,
            **ATTENTION_BIAS,
            "mlp_bias": ("add_mlp_bias", False),
            "embedding_multiplier": ("embedding_multiplier", 1.0),
            "residual_multiplier": ("residual_multiplier", 1.0),
            "attention_multiplier": ("attention_multiplier", 1.0),
        },
        LLAMA_FIXED,
        LLAMA_NAMES,
        _granite,
        lambda model: {**write_llama(model), "logits_scaling": 1 / model.logits_factor},
        LLAMA_READ | {"logits_scaling"},
        off=SILU,
    ),
    "minicpm": Family(
        "MiniCPMForCausalLM",
        LLAMA_KEYS | _TIED,
        LLAMA_FIXED,
        LLAMA_NAMES,
        _minicpm,
        _write_minicpm,
        LLAMA_READ | _OWN_CODE | {"scale_emb", "scale_depth", "dim_model_base"},
        off=SILU,
    ),
    "cohere": Family(
        "CohereForCausalLM",
        _COHERE_KEYS,
        _COHERE_FIXED,
        LLAMA_NAMES,
        _cohere,
        _write_cohere,
        LLAMA_READ | {"use_qk_norm"},
        off=SILU,
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        _COHERE_KEYS,
        _COHERE_FIXED,
        LLAMA_NAMES,
        _cohere2,
        lambda model: {**write_llama(model), **hf_pattern(model)},
        LLAMA_READ | PATTERN_READ | {"sliding_window_pattern", "_sliding_window_pattern"},
        off=SILU,
    ),
    "glm": _glm("GlmForCausalLM", sandwich=False),
    "glm4": _glm("Glm4ForCausalLM", sandwich=True),
    "stablelm": Family(
        "StableLmForCausalLM",
        {
            **_with_epsilon("layer_norm_eps"),
            "use_qkv_bias": ("add_qkv_bias", False),
            "hidden_dropout": ("hidden_dropout_prob", 0.0),
        },
        LLAMA_FIXED | {"normalization": "LayerNorm"},
        LLAMA_NAMES | _STABLELM_HEADS,
        _stablelm,
        _write_stablelm,
        LLAMA_READ | {"use_parallel_residual", "qk_layernorm"},
        off=SILU,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        LLAMA_KEYS | {"rms_norm_eps": ("norm_epsilon", 1e-5), "resid_pdrop": ("hidden_dropout_prob", 0.0)},
        LLAMA_FIXED,
        LLAMA_NAMES | _GATE_AND_UP | {f"{_ROW}attention.qkv": "model.layers.{}.self_attn.qkv_proj"},
        _phi3,
        _write_phi3,
        LLAMA_READ | {"sliding_window"},
        has_parts_in_a_row=True,
        off=SILU,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        LLAMA_KEYS | ATTENTION_BIAS | _TIED | {"mlp_bias": ("add_mlp_bias", False)},
        LLAMA_FIXED,
        LLAMA_NAMES,
        _smollm3,
        _write_smollm3,
        LLAMA_READ | {"no_rope_layers", "no_rope_layer_interval"},
        required=("num_key_value_heads",),
        off=SILU,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _OLMO_KEYS,
        _OLMO_FIXED,
        _OLMO_NAMES,
        llama_like,
        write_llama,
        LLAMA_READ,
        off=SILU,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _OLMO_KEYS,
        _OLMO_FIXED,
        _OLMO_NAMES,
        _olmo3,
        _write_olmo3,
        LLAMA_READ | PATTERN_READ,
        off=SILU,
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        LLAMA_KEYS
        | _TIED
        | {
            "rms_norm_eps": ("norm_epsilon", 1e-5),
            "use_bias": ("add_qkv_bias add_out_proj_bias add_mlp_bias", False),
        },
        LLAMA_FIXED | {"rotary_interleaved": True},
        LLAMA_NAMES,
        lambda config: llama_like({"rope_theta": 5e5, **config}),
        write_llama,
        LLAMA_READ,
        required=("num_key_value_heads", "head_dim"),
        off=SILU,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        LLAMA_KEYS
        | {
            "attention_bias": ("add_qkv_bias", True),
            "attention_out_bias": ("add_out_proj_bias", False),
            "mlp_bias": ("add_mlp_bias", False),
            "attention_dropout": ("attention_probs_dropout_prob", 0.1),
            "residual_dropout": ("hidden_dropout_prob", 0.1),
        },
        LLAMA_FIXED | {"embedding_dropout_prob": 0.0},
        LLAMA_NAMES,
        llama_like,
        write_llama,
        LLAMA_READ,
        required=("num_key_value_heads", "head_dim"),
        off=SILU,
    ),
    "internlm2": Family(
        "InternLM2ForCausalLM",
        LLAMA_KEYS | {"bias": ("add_qkv_bias add_out_proj_bias", False)},
        LLAMA_FIXED,
        _INTERNLM2_NAMES,
        llama_like,
        write_llama,
        LLAMA_READ | _OWN_CODE,
        part_names={"gate": "w1", "up": "w3"},
        off=SILU,
    ),
    "baichuan": Family(
        "BaichuanForCausalLM",
        {key: row for key, row in LLAMA_KEYS.items() if key != "max_position_embeddings"},
        LLAMA_FIXED,
        LLAMA_NAMES | {f"{_ROW}attention.qkv": "model.layers.{}.self_attn.W_pack"},
        _baichuan,
        _write_baichuan,
        LLAMA_READ | _OWN_CODE | {"max_position_embeddings", "model_max_length"},
        has_parts_in_a_row=True,
        off=SILU | {"num_key_value_heads": ()},
    ),
}
