"""The networks of Hugging Face's that ours can be: which keys of a ``config.json`` each of them reads, and
what they are in our ``Model`` section. NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.conversion.huggingface.rope import PLACES, rope_keys

ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu_exact",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
"""Activations without a gate: transformers' name to ours."""
# Names under which transformers takes GPT-2's sizes as well.
_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


@dataclass(frozen=True)
class Family:
    """One ``model_type``.

    Attributes:
        keys: a ``config.json`` without nulls to keys of our ``Model`` section.
        mapped: the keys that it reads.
        needed: keys that must be there, if only as null, because their default in transformers is a number of
            one model.
        off: keys that are accepted at these values only, beside those of all families.
    """

    keys: Callable[[Mapping[str, Any]], dict[str, Any]]
    mapped: Collection[str]
    needed: Collection[str] = ()
    off: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def _gpt2_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(given)
    for alias, name in _GPT2_ALIASES.items():
        if alias in config and config.setdefault(name, config[alias]) != config[alias]:
            one, two = shown(config[alias]), shown(config[name])
            raise CheckpointError(f"config.json: {alias} ({one}) and {name} ({two}) are one size")
    hidden, heads = _needed(config, "n_embd"), _needed(config, "n_head")
    return {
        "vocab_size": _needed(config, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": _needed(config, "n_layer"),
        "num_attention_heads": heads,
        "ffn_hidden_size": config.get("n_inner", 4 * hidden),
        "max_position_embeddings": _needed(config, "n_positions"),
        "hidden_act": _activation(config, "activation_function", "gelu_new", "GPT-2"),
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "initializer_range": config.get("initializer_range", 0.02),
        "hidden_dropout_prob": config.get("resid_pdrop", 0.1),
        "attention_probs_dropout_prob": config.get("attn_pdrop", 0.1),
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
        "add_bias_linear": True,
    }


def _neox_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = _needed(config, "hidden_size"), _needed(config, "num_attention_heads")
    _check_heads(hidden, heads)
    attention_bias = config.get("attention_bias", True)
    return {
        "vocab_size": _needed(config, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": _needed(config, "num_hidden_layers"),
        "num_attention_heads": heads,
        "ffn_hidden_size": _needed(config, "intermediate_size"),
        "max_position_embeddings": _needed(config, "max_position_embeddings"),
        "hidden_act": _activation(config, "hidden_act", "gelu", "GPT-NeoX"),
        "norm_epsilon": config.get("layer_norm_eps", 1e-5),
        "initializer_range": config.get("initializer_range", 0.02),
        "hidden_dropout_prob": config.get("hidden_dropout", 0.0),
        "attention_probs_dropout_prob": config.get("attention_dropout", 0.0),
        "position_embedding_type": "rope",
        **rope_keys(config),
        "normalization": "LayerNorm",
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "add_bias_linear": True,
        "add_qkv_bias": attention_bias,
        "add_out_proj_bias": attention_bias,
        "add_mlp_bias": True,
        "parallel_residual": config.get("use_parallel_residual", True),
    }


def _llama_like(
    config: Mapping[str, Any],
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
) -> dict[str, Any]:
    """What Llama, Mistral and Qwen have in common."""
    hidden, heads = _needed(config, "hidden_size"), _needed(config, "num_attention_heads")
    if "head_dim" not in config:
        _check_heads(hidden, heads)
    return {
        "vocab_size": _needed(config, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": _needed(config, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim", hidden // heads),
        "ffn_hidden_size": _needed(config, "intermediate_size"),
        "max_position_embeddings": _needed(config, "max_position_embeddings"),
        "hidden_act": "swiglu",
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "initializer_range": config.get("initializer_range", 0.02),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": config.get("attention_dropout", 0.0),
        "position_embedding_type": "rope",
        **rope_keys(config),
        "normalization": "RMSNorm",
        # PaddleFormers leaves the key out where it is true, everybody else where it is false.
        "tie_word_embeddings": config.get("tie_word_embeddings", "paddleformers_version" in config),
        "add_bias_linear": False,
        "add_qkv_bias": qkv_bias,
        "add_out_proj_bias": output_bias,
        "add_mlp_bias": mlp_bias,
    }


def _llama_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = config.get("attention_bias", False)
    return _llama_like(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.get("mlp_bias", False))


def _mistral_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return _llama_like(config) | _window(config, config.get("sliding_window"))


def _qwen2_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return _llama_like(config, qkv_bias=True) | _window(config, _qwen_window(config))


def _qwen3_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = config.get("attention_bias", False)
    keys = _llama_like(config, qkv_bias=bias, output_bias=bias)
    return keys | _window(config, _qwen_window(config)) | {"qk_layernorm": True}


def _qwen_window(config: Mapping[str, Any]) -> int | None:
    """The window of all layers; None: there is none, or none that is shorter than the longest sequence."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    layers, first = _needed(config, "num_hidden_layers"), config.get("max_window_layers", 28)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [
            "full_attention" if window is None or i < first else "sliding_attention" for i in range(layers)
        ]
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"config.json: layer_types {shown(kinds)} of this {config['model_type']} is not supported"
        )
    windowed = kinds.count("sliding_attention")
    if windowed and window is None:
        raise CheckpointError(
            "config.json: layer_types has sliding_attention, and use_sliding_window is not true"
        )
    if not windowed or window >= _needed(config, "max_position_embeddings"):
        return None
    if windowed < layers:
        raise CheckpointError(
            f"config.json: {windowed} of {layers} layers have a window of {window} tokens "
            "(use_sliding_window, max_window_layers, layer_types). Either all layers have the same window, "
            f"or none has. For sequences of up to {window} tokens the window changes nothing: to use the "
            "model for those, set use_sliding_window to false, take out layer_types, and set "
            f"max_position_embeddings to {window}"
        )
    return window


def _window(config: Mapping[str, Any], window: int | None) -> dict[str, Any]:
    """``attention_window``: theirs counts the position itself, ours those before it."""
    if window is None or window >= _needed(config, "max_position_embeddings"):
        return {"attention_window": None}
    if window == 1:
        raise CheckpointError(
            "config.json: sliding_window 1 is not supported: a token would see itself alone"
        )
    return {"attention_window": window - 1}


def _activation(config: Mapping[str, Any], key: str, default: str, family: str) -> str:
    name = config.get(key, default)
    if name not in ACTIVATIONS:
        raise CheckpointError(f"{key} {shown(name)} of this {family} is not supported")
    return ACTIVATIONS[name]


def _check_heads(hidden: int, heads: int) -> None:
    if hidden % heads:
        raise CheckpointError(f"config.json: {heads} heads do not divide the hidden size {hidden}")


def _needed(config: Mapping[str, Any], key: str) -> Any:
    if key not in config:
        raise CheckpointError(f"config.json lacks {key}")
    return config[key]


_SIZES = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "initializer_range", "attention_dropout", "tie_word_embeddings",
    "original_max_position_embeddings", *PLACES,
}  # fmt: skip
_LLAMA = _SIZES | {
    "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "partial_rotary_factor",
}  # fmt: skip
_QWEN = _LLAMA | {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
_SILU = {"hidden_act": ("silu", "swish")}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        _gpt2_keys,
        {
            "vocab_size", "n_embd", "n_layer", "n_head", "n_inner", "n_positions", "activation_function",
            "layer_norm_epsilon", "initializer_range", "resid_pdrop", "attn_pdrop", "tie_word_embeddings",
            *_GPT2_ALIASES,
        },
        off={
            "scale_attn_by_inverse_layer_idx": (False,),
            "scale_attn_weights": (True,),
            "position_embedding_type": ("absolute", "learned"),
        },
    ),
    "llama": Family(_llama_keys, _LLAMA | {"attention_bias", "mlp_bias"}, off=_SILU),
    "mistral": Family(
        _mistral_keys, _LLAMA | {"sliding_window"}, ("num_key_value_heads", "sliding_window"), _SILU
    ),
    "qwen2": Family(_qwen2_keys, _QWEN, ("num_key_value_heads",), _SILU),
    "qwen3": Family(
        _qwen3_keys, _QWEN | {"attention_bias"}, ("num_key_value_heads", "head_dim"), _SILU
    ),
    "gpt_neox": Family(
        _neox_keys,
        _SIZES | {
            "hidden_act", "layer_norm_eps", "hidden_dropout", "rotary_pct", "rotary_emb_base",
            "attention_bias", "use_parallel_residual",
        },
    ),
}  # fmt: skip
"""By ``model_type``."""
