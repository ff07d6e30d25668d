"""Hugging Face's ``config.json`` for a ``Model`` section: the inverse of ``models.gpt.hf.model_keys``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppfleetx.config.effects import network
from ppfleetx.config.errors import CheckpointError, UserError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.validate import section_of
from ppfleetx.models.gpt.hf_keys import model_keys
from ppfleetx.models.gpt.hf_rope import hf_rope
from ppfleetx.models.gpt.shape import parameter_shapes

_TORCH_DTYPE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_GPT2_ACTIVATION = {"gelu": "gelu_new", "gelu_exact": "gelu", "quick_gelu": "quick_gelu", "relu": "relu"}


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
        token_ids: `bos_token_id` and `eos_token_id`, for a configuration made anew.

    Raises:
        CheckpointError: neither GPT-2 nor Llama can express the network; says what stands in the way.
    """
    if original is not None and describes(original, model):
        config = dict(original)
    else:
        config = _gpt2(model) if model.position_embedding_type == "learned_absolute" else _llama(model)
        config |= token_ids or {"bos_token_id": None, "eos_token_id": None}
    if not describes(config, model):
        raise CheckpointError("this network cannot be written as a Hugging Face GPT-2 or Llama")
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


def _gpt2(model: ModelConfig) -> dict[str, Any]:
    biases = (model.has_qkv_bias, model.has_out_proj_bias, model.has_mlp_bias)
    _require(
        "GPT-2 (learned positions)",
        {
            "name is GPT": model.name == "GPT",
            "normalization is LayerNorm": model.normalization == "LayerNorm",
            "all linears have biases": all(biases),
            "hidden_act is gelu, gelu_exact, quick_gelu or relu": model.hidden_act in _GPT2_ACTIVATION,
            "every query head has its own keys": model.kv_heads == model.num_attention_heads,
            "the heads make up the hidden size": model.head_size * model.num_attention_heads
            == model.hidden_size,
            "there is no sandwich_norm": not model.sandwich_norm,
            "there is no attention_window": model.attention_window is None,
            "the head has no bias": not model.has_head_bias,
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
        "activation_function": _GPT2_ACTIVATION[model.hidden_act],
        "layer_norm_epsilon": model.norm_epsilon,
        "initializer_range": model.initializer_range,
        "resid_pdrop": model.hidden_dropout_prob,
        "embd_pdrop": model.embedding_dropout,
        "attn_pdrop": model.attention_probs_dropout_prob,
        "tie_word_embeddings": model.tie_word_embeddings,
    }


def _llama(model: ModelConfig) -> dict[str, Any]:
    _require(
        "Llama (rotary positions)",
        {
            "name is GPT": model.name == "GPT",
            "position_embedding_type is rope": model.position_embedding_type == "rope",
            "normalization is RMSNorm": model.normalization == "RMSNorm",
            "hidden_act is swiglu": model.hidden_act == "swiglu",
            "add_qkv_bias equals add_out_proj_bias": model.has_qkv_bias == model.has_out_proj_bias,
            "there is no sandwich_norm": not model.sandwich_norm,
            "rotary_percent is 1": model.rotary_percent == 1,
            "there is no attention_window": model.attention_window is None,
            "the head has no bias": not model.has_head_bias,
        },
    )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "attention_bias": model.has_qkv_bias,
        "mlp_bias": model.has_mlp_bias,
        "tie_word_embeddings": model.tie_word_embeddings,
    }


def _require(what: str, conditions: Mapping[str, bool]) -> None:
    broken = [rule for rule, holds in conditions.items() if not holds]
    if broken:
        raise CheckpointError(
            f"this network cannot be written as a Hugging Face {what}, where {'; where '.join(broken)}"
        )
