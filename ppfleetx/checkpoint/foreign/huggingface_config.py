"""Hugging Face's ``config.json`` for a ``Model`` section: the inverse of ``models.gpt.hf.model_keys``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppfleetx.config.errors import CheckpointError, UserError
from ppfleetx.config.resume_policy import network
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.validate import section_of
from ppfleetx.models.gpt.hf_keys import model_keys
from ppfleetx.models.gpt.hf_rope import hf_neox_rope, hf_rope
from ppfleetx.models.gpt.spec import parameter_shapes

_TORCH_DTYPE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_ACTIVATION = {"gelu": "gelu_new", "gelu_exact": "gelu", "quick_gelu": "quick_gelu", "relu": "relu"}


def hf_config(
    model: ModelConfig,
    dtype: str,
    *,
    original: Mapping[str, Any] | None = None,
    token_ids: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The configuration under which ``transformers`` computes what `model` computes.

    Args:
        model: the network.
        dtype: element type of the weights, as in safetensors files.
        original: the configuration the weights once came with; kept if it describes the same network.
        token_ids: `bos_token_id` and `eos_token_id`, for a new configuration.

    Raises:
        CheckpointError: none of Hugging Face's networks is this one; says what stands in the way.
    """
    if original is not None and describes(original, model):
        config = dict(original)
    else:
        config = _made(model) | (token_ids or {"bos_token_id": None, "eos_token_id": None})
    if not describes(config, model):
        raise CheckpointError("this network cannot be written in Hugging Face's format")
    config.pop("dtype", None)
    return config | {"torch_dtype": _TORCH_DTYPE[dtype]}


def describes(config: Mapping[str, Any], model: ModelConfig) -> bool:
    """Whether a Hugging Face configuration and a ``Model`` section are the same function."""
    try:
        other = section_of(ModelConfig, model_keys(config) | {"vocab_size_divisible_unit": 1})
    except UserError:
        return False
    mine = model.model_copy(update={"vocab_size_divisible_unit": 1})
    return parameter_shapes(other) == parameter_shapes(mine) and network(other) == network(mine)


def _made(model: ModelConfig) -> dict[str, Any]:
    """The configuration of the network of Hugging Face's that comes nearest to ``model``."""
    _require(
        "model",
        {
            "name is GPT": model.name == "GPT",
            "there is no sandwich_norm": not model.sandwich_norm,
            "the head has no bias": not model.has_head_bias,
        },
    )
    if model.position_embedding_type == "learned_absolute":
        return _gpt2(model)
    if model.position_embedding_type == "rope" and model.normalization == "LayerNorm":
        return _neox(model)
    return _llama_like(model)


def _gpt2(model: ModelConfig) -> dict[str, Any]:
    biases = (model.has_qkv_bias, model.has_out_proj_bias, model.has_mlp_bias)
    _require(
        "GPT-2 (learned positions)",
        {
            "normalization is LayerNorm": model.normalization == "LayerNorm",
            "all linears have biases": all(biases),
            "hidden_act is gelu, gelu_exact, quick_gelu or relu": model.hidden_act in _ACTIVATION,
            "every query head has its own keys": model.kv_heads == model.num_attention_heads,
            "the heads make up the hidden size": model.head_size * model.num_attention_heads
            == model.hidden_size,
            "there is no attention_window": model.attention_window is None,
            "there is no qk_layernorm": not model.qk_layernorm,
            "there is no parallel_residual": not model.parallel_residual,
        },
    )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocab_size,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_size,
        "n_positions": model.max_position_embeddings,
        "activation_function": _ACTIVATION[model.hidden_act],
        "layer_norm_epsilon": model.norm_epsilon,
        "initializer_range": model.initializer_range,
        "resid_pdrop": model.hidden_dropout_prob,
        "embd_pdrop": model.embedding_dropout,
        "attn_pdrop": model.attention_probs_dropout_prob,
        "tie_word_embeddings": model.tie_word_embeddings,
    }


def _neox(model: ModelConfig) -> dict[str, Any]:
    _require(
        "GPT-NeoX (rotary positions, LayerNorm)",
        {
            "hidden_act is gelu, gelu_exact, quick_gelu or relu": model.hidden_act in _ACTIVATION,
            "add_qkv_bias equals add_out_proj_bias": model.has_qkv_bias == model.has_out_proj_bias,
            "the MLP has biases": model.has_mlp_bias,
            "every query head has its own keys": model.kv_heads == model.num_attention_heads,
            "the heads make up the hidden size": model.head_size * model.num_attention_heads
            == model.hidden_size,
            "there is no qk_layernorm": not model.qk_layernorm,
            "there is no attention_window": model.attention_window is None,
        },
    )
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": model.max_position_embeddings,
        "hidden_act": _ACTIVATION[model.hidden_act],
        "layer_norm_eps": model.norm_epsilon,
        **hf_neox_rope(model),
        "use_parallel_residual": model.parallel_residual,
        "initializer_range": model.initializer_range,
        "hidden_dropout": model.hidden_dropout_prob,
        "attention_dropout": model.attention_probs_dropout_prob,
        "attention_bias": model.has_qkv_bias,
        "tie_word_embeddings": model.tie_word_embeddings,
    }


def _llama_like(model: ModelConfig) -> dict[str, Any]:
    """Llama where it can be; Qwen3 for normalised heads, Qwen2 for its biases, Mistral for a window."""
    qkv, output, mlp = model.has_qkv_bias, model.has_out_proj_bias, model.has_mlp_bias
    _require(
        "Llama, Mistral or Qwen (rotary positions)",
        {
            "position_embedding_type is rope": model.position_embedding_type == "rope",
            "normalization is RMSNorm": model.normalization == "RMSNorm",
            "hidden_act is swiglu": model.hidden_act == "swiglu",
            "rotary_percent is 1": model.rotary_percent == 1,
            "there is no parallel_residual": not model.parallel_residual,
        },
    )
    windowed, bias = model.attention_window is not None, "add_qkv_bias equals add_out_proj_bias"
    no_mlp_bias = {"the MLP has no biases": not mlp}
    if model.qk_layernorm:
        _require("Qwen3 (qk_layernorm)", {bias: qkv == output, **no_mlp_bias})
        kind, own = "qwen3", {"attention_bias": qkv, **_qwen_window(model)}
    elif qkv and not output:
        _require("Qwen2 (biases of queries, keys and values alone)", no_mlp_bias)
        kind, own = "qwen2", _qwen_window(model)
    elif windowed:
        _require("Mistral (attention_window)", {"no linear has a bias": not (qkv or output or mlp)})
        kind, own = "mistral", {"sliding_window": model.attention_window + 1}
    else:
        _require("Llama", {bias: qkv == output})
        kind, own = "llama", {"attention_bias": qkv, "mlp_bias": mlp}
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": model.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        **hf_rope(model),
        "initializer_range": model.initializer_range,
        "attention_dropout": model.attention_probs_dropout_prob,
        "tie_word_embeddings": model.tie_word_embeddings,
        **own,
    }


def _qwen_window(model: ModelConfig) -> dict[str, Any]:
    if model.attention_window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    return {
        "use_sliding_window": True,
        "sliding_window": model.attention_window + 1,
        "max_window_layers": 0,
    }


def _require(what: str, conditions: Mapping[str, bool]) -> None:
    broken = [rule for rule, holds in conditions.items() if not holds]
    if broken:
        raise CheckpointError(
            f"this network cannot be written as a Hugging Face {what}, where {'; where '.join(broken)}"
        )
