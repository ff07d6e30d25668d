"""Relatives of GPT, with LayerNorm, MLPs without a gate and, in most of them, biases."""

from __future__ import annotations

from typing import Any

from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.huggingface.family import (
    GPT2_ALIASES,
    GPT2_FIXED,
    GPT2_NAMES,
    GPT2_SIZES,
    INIT,
    NEEDED,
    ROPE,
    SIZES,
    Config,
    Family,
    activation,
    activation_name,
    check_heads,
    hf_window,
    window_keys,
)
from ppfleetx.conversion.huggingface.rope import hf_partial_rope, hf_rope, rope_keys

_ROW = "decoder.layers.{}."
_LAYER_NORM = {"normalization": "LayerNorm", "add_bias_linear": True}
_ROTARY = _LAYER_NORM | {"position_embedding_type": "rope"}
_TURNING = ROPE | {"rope_theta", "partial_rotary_factor"}


def _names(
    row: str, words: str, final: str, head: str, layers: dict[str, str], others: dict[str, str] | None = None
) -> dict[str, str]:
    """The names of tensors; the names of a layer's tensors begin with ``row``."""
    of_layers = {f"{_ROW}{ours}": f"{row}.{theirs}" for ours, theirs in layers.items()}
    return {"embedding.word_embeddings": words, **of_layers, "decoder.final_norm": final, "head": head} | (
        others or {}
    )


# ---- GPT-J


def _gptj(config: Config) -> dict[str, Any]:
    head = config["n_embd"] // config["n_head"]
    turned = config.get("rotary_dim")
    if not isinstance(turned, int) or not 0 < turned <= head:
        raise CheckpointError(f"config.json: rotary_dim {shown(turned)} is not a part of a head of {head}")
    return {**activation(config, "activation_function", "gelu_new"), "rotary_percent": turned / head}


def _write_gptj(model: ModelConfig) -> dict[str, Any]:
    return {
        "activation_function": activation_name(model),
        "rotary_dim": model.rotary_size,
        "embd_pdrop": model.embedding_dropout,
    }


# ---- Phi, GPT-BigCode, StarCoder 2


def _phi(config: Config) -> dict[str, Any]:
    check_heads(config)
    return {**activation(config, "hidden_act", "gelu_new"), **rope_keys(config)}


def _bigcode(config: Config) -> dict[str, Any]:
    groups = 1 if config.get("multi_query", True) else config["n_head"]
    return {**activation(config, "activation_function", "gelu_pytorch_tanh"), "num_query_groups": groups}


def _write_bigcode(model: ModelConfig) -> dict[str, Any]:
    return {
        "activation_function": activation_name(model),
        "multi_query": model.kv_heads == 1,
        "embd_pdrop": model.embedding_dropout,
    }


def _starcoder2(config: Config) -> dict[str, Any]:
    return _phi({"hidden_act": "gelu_pytorch_tanh", **config}) | window_keys(
        config, config.get("sliding_window")
    )


def _write_starcoder2(model: ModelConfig) -> dict[str, Any]:
    return {"hidden_act": activation_name(model), "sliding_window": hf_window(model), **hf_rope(model)}


# ---- OPT


def _opt(config: Config) -> dict[str, Any]:
    width = config.get("word_embed_proj_dim", config["hidden_size"])
    if width != config["hidden_size"]:
        raise CheckpointError(
            f"config.json: word_embed_proj_dim {width} is not hidden_size: a projection is not built"
        )
    return activation(config, "activation_function", "relu")


# ---- BLOOM and Falcon


def _falcon(config: Config) -> dict[str, Any]:
    is_new, heads = config.get("new_decoder_architecture", False), config["num_attention_heads"]
    groups = 1 if config.get("multi_query", True) else heads
    if is_new:
        groups = config.get("num_kv_heads", heads)
    is_parallel = config.get("parallel_attn", True)
    if is_new and not is_parallel:
        raise CheckpointError("config.json: new_decoder_architecture without parallel_attn is not supported")
    return {
        **activation(config, "activation", "gelu"),
        **rope_keys(config),
        "num_query_groups": groups,
        "parallel_residual": is_parallel,
        "shared_input_norm": is_parallel and _norms_of_falcon(config) == 1,
    }


def _norms_of_falcon(config: Config) -> int:
    default = 2 if config.get("new_decoder_architecture", False) else 1
    return config.get("num_ln_in_parallel_attn") or default


def _names_of_falcon(config: Config) -> dict[str, str]:
    if _norms_of_falcon(config) == 1 or not config.get("parallel_attn", True):
        return {}
    return {f"{_ROW}input_norm": "transformer.h.{}.ln_attn", f"{_ROW}mlp_norm": "transformer.h.{}.ln_mlp"}


def _write_falcon(model: ModelConfig) -> dict[str, Any]:
    is_new = model.parallel_residual and (model.kv_heads > 1 or not model.shared_input_norm)
    return {
        **hf_rope(model),
        "activation": activation_name(model),
        "new_decoder_architecture": is_new,
        "num_kv_heads": model.kv_heads,
        "multi_query": model.kv_heads == 1 and not is_new,
        "parallel_attn": model.parallel_residual,
        "num_ln_in_parallel_attn": (1 if model.shared_input_norm else 2) if is_new else None,
        "alibi": False,
    }


_MEGATRON_LAYERS = {
    "input_norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.out_proj": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.fc1": "mlp.dense_h_to_4h",
    "mlp.fc2": "mlp.dense_4h_to_h",
}

GPT_KIN: dict[str, Family] = {
    "gptj": Family(
        "GPTJForCausalLM",
        {key: row for key, row in GPT2_SIZES.items() if key != "tie_word_embeddings"}
        | {"resid_pdrop": ("hidden_dropout_prob", 0.0), "attn_pdrop": ("attention_probs_dropout_prob", 0.0)},
        _ROTARY
        | {
            "add_qkv_bias": False,
            "add_out_proj_bias": False,
            "add_head_bias": True,
            "tie_word_embeddings": False,
            "parallel_residual": True,
            "shared_input_norm": True,
            "rotary_interleaved": True,
        },
        _names(
            "transformer.h.{}",
            "transformer.wte",
            "transformer.ln_f",
            "lm_head",
            {
                "input_norm": "ln_1",
                "attention.qkv": "attn.{part}_proj",
                "attention.out_proj": "attn.out_proj",
                "mlp.fc1": "mlp.fc_in",
                "mlp.fc2": "mlp.fc_out",
            },
        ),
        _gptj,
        _write_gptj,
        {"activation_function", "rotary_dim"},
        aliases=GPT2_ALIASES,
        off={"tie_word_embeddings": (False,)},
    ),
    "phi": Family(
        "PhiForCausalLM",
        {
            **SIZES,
            "num_key_value_heads": ("num_query_groups", lambda config: config["num_attention_heads"]),
            "layer_norm_eps": ("norm_epsilon", 1e-5),
            "resid_pdrop": ("hidden_dropout_prob", 0.0),
        },
        _ROTARY
        | {
            "add_head_bias": True,
            "tie_word_embeddings": False,
            "parallel_residual": True,
            "shared_input_norm": True,
        },
        _names(
            "model.layers.{}",
            "model.embed_tokens",
            "model.final_layernorm",
            "lm_head",
            {
                "input_norm": "input_layernorm",
                "attention.qkv": "self_attn.{part}_proj",
                "attention.out_proj": "self_attn.dense",
                "mlp.fc1": "mlp.fc1",
                "mlp.fc2": "mlp.fc2",
            },
        ),
        _phi,
        lambda model: {
            "hidden_act": activation_name(model),
            "embd_pdrop": model.embedding_dropout,
            **hf_partial_rope(model),
        },
        _TURNING | {"hidden_act"},
        off={"qk_layernorm": (False,), "tie_word_embeddings": (False,)},
    ),
    "gpt_bigcode": Family(
        "GPTBigCodeForCausalLM",
        GPT2_SIZES,
        GPT2_FIXED,
        GPT2_NAMES,
        _bigcode,
        _write_bigcode,
        {"activation_function", "multi_query", "num_key_value_heads"},
        aliases=GPT2_ALIASES,
        off={"scale_attn_weights": (True,)},
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        {
            **SIZES,
            "num_key_value_heads": ("num_query_groups", NEEDED),
            "norm_epsilon": ("norm_epsilon", 1e-5),
            "use_bias": ("add_bias_linear", True),
            "residual_dropout": ("hidden_dropout_prob", 0.0),
            "embedding_dropout": ("embedding_dropout_prob", 0.0),
            "tie_word_embeddings": ("tie_word_embeddings", True),
        },
        {"position_embedding_type": "rope", "normalization": "LayerNorm"},
        _names(
            "model.layers.{}",
            "model.embed_tokens",
            "model.norm",
            "lm_head",
            {
                "input_norm": "input_layernorm",
                "attention.qkv": "self_attn.{part}_proj",
                "attention.out_proj": "self_attn.o_proj",
                "mlp_norm": "post_attention_layernorm",
                "mlp.fc1": "mlp.c_fc",
                "mlp.fc2": "mlp.c_proj",
            },
        ),
        _starcoder2,
        _write_starcoder2,
        ROPE | {"rope_theta", "hidden_act", "sliding_window"},
    ),
    "opt": Family(
        "OPTForCausalLM",
        {
            "vocab_size": ("vocab_size", NEEDED),
            "hidden_size": ("hidden_size", NEEDED),
            "num_hidden_layers": ("num_layers", NEEDED),
            "num_attention_heads": ("num_attention_heads", NEEDED),
            "ffn_dim": ("ffn_hidden_size", NEEDED),
            "max_position_embeddings": ("max_position_embeddings", 2048),
            "init_std": INIT,
            "dropout": ("hidden_dropout_prob", 0.1),
            "attention_dropout": ("attention_probs_dropout_prob", 0.0),
            "tie_word_embeddings": ("tie_word_embeddings", True),
        },
        GPT2_FIXED | {"position_offset": 2},
        _names(
            "model.decoder.layers.{}",
            "model.decoder.embed_tokens",
            "model.decoder.final_layer_norm",
            "lm_head",
            {
                "input_norm": "self_attn_layer_norm",
                "attention.qkv": "self_attn.{part}_proj",
                "attention.out_proj": "self_attn.out_proj",
                "mlp_norm": "final_layer_norm",
                "mlp.fc1": "fc1",
                "mlp.fc2": "fc2",
            },
            {"embedding.position_embeddings": "model.decoder.embed_positions"},
        ),
        _opt,
        lambda model: {
            "activation_function": activation_name(model),
            "word_embed_proj_dim": model.hidden_size,
        },
        {"activation_function", "word_embed_proj_dim"},
        off={
            "do_layer_norm_before": (True,),
            "enable_bias": (True,),
            "layer_norm_elementwise_affine": (True,),
            "_remove_final_layer_norm": (False,),
            "layerdrop": (0, 0.0),
        },
    ),
    "bloom": Family(
        "BloomForCausalLM",
        {
            "vocab_size": ("vocab_size", NEEDED),
            "hidden_size": ("hidden_size", NEEDED),
            "n_layer": ("num_layers", NEEDED),
            "n_head": ("num_attention_heads", NEEDED),
            "seq_length": ("max_position_embeddings", 2048),
            "layer_norm_epsilon": ("norm_epsilon", 1e-5),
            "initializer_range": INIT,
            "hidden_dropout": ("hidden_dropout_prob", 0.0),
            "attention_dropout": ("attention_probs_dropout_prob", 0.0),
            "tie_word_embeddings": ("tie_word_embeddings", True),
        },
        _LAYER_NORM | {"position_embedding_type": "alibi", "embedding_norm": True, "hidden_act": "gelu"},
        _names(
            "transformer.h.{}",
            "transformer.word_embeddings",
            "transformer.ln_f",
            "lm_head",
            _MEGATRON_LAYERS,
            {"embedding.norm": "transformer.word_embeddings_layernorm"},
        ),
        aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
        off={"apply_residual_connection_post_layernorm": (False,), "slow_but_exact": (False,)},
    ),
    "falcon": Family(
        "FalconForCausalLM",
        {
            "vocab_size": ("vocab_size", NEEDED),
            "hidden_size": ("hidden_size", NEEDED),
            "num_hidden_layers": ("num_layers", NEEDED),
            "num_attention_heads": ("num_attention_heads", NEEDED),
            "ffn_hidden_size": ("ffn_hidden_size", lambda config: 4 * config["hidden_size"]),
            "max_position_embeddings": ("max_position_embeddings", 2048),
            "layer_norm_epsilon": ("norm_epsilon", 1e-5),
            "initializer_range": INIT,
            "hidden_dropout": ("hidden_dropout_prob", 0.0),
            "attention_dropout": ("attention_probs_dropout_prob", 0.0),
            "bias": ("add_bias_linear", False),
            "tie_word_embeddings": ("tie_word_embeddings", True),
        },
        {"position_embedding_type": "rope", "normalization": "LayerNorm"},
        _names(
            "transformer.h.{}", "transformer.word_embeddings", "transformer.ln_f", "lm_head", _MEGATRON_LAYERS
        ),
        _falcon,
        _write_falcon,
        ROPE
        | {"rope_theta", "activation", "new_decoder_architecture", "num_kv_heads", "multi_query"}
        | {"parallel_attn", "num_ln_in_parallel_attn"},
        other_names=_names_of_falcon,
        aliases={"n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"},
        off={"alibi": (False,)},
    ),
}
