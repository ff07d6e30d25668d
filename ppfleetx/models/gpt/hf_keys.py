"""Every key of a Hugging Face ``config.json``, and what becomes of it: our ``Model`` section, nothing, or a
refusal. NumPy only.

A key either is mapped to one of ours, or has no effect on what the network computes, or is accepted at the
value that switches it off. Any other key is refused by name, because a network with an option that was not
read is another network. null is "not given" everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.models.gpt.hf_rope import PLACES, rope_keys
from ppfleetx.models.gpt.hf_values import check_values

_GPT2_ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu_exact",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
# Names under which transformers takes GPT-2's sizes as well.
_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_MAPPED = {
    "gpt2": {
        "vocab_size", "n_embd", "n_layer", "n_head", "n_inner", "n_positions", "activation_function",
        "layer_norm_epsilon", "initializer_range", "resid_pdrop", "attn_pdrop", "tie_word_embeddings",
        *_GPT2_ALIASES,
    },
    "llama": {
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "intermediate_size", "max_position_embeddings", "rms_norm_eps", "initializer_range",
        "attention_dropout", "attention_bias", "mlp_bias", "tie_word_embeddings", "rope_theta",
        "original_max_position_embeddings", "partial_rotary_factor", *PLACES,
    },
}  # fmt: skip
# Where a file came from, how it is stored, what runs it, how it generates and what else it may be used for.
_WITHOUT_EFFECT = {
    "model_type", "architectures", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash",
    "torch_dtype", "dtype", "unsloth_version", "unsloth_fixed", "transformers.js_config", "is_llama_config",
    "use_cache", "output_hidden_states", "output_attentions", "_output_attentions", "return_dict",
    "torchscript", "use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward", "gradient_checkpointing",
    "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled",
    "_attn_implementation_internal", "experts_implementation", "_experts_implementation",
    "_experts_implementation_internal", "is_decoder", "pretraining_tp", "reorder_and_upcast_attn",
    "tie_last_hidden_states", "tokenizer_class", "prefix", "bos_token_id", "eos_token_id", "pad_token_id",
    "sep_token_id", "unk_token_id", "cls_token_id", "mask_token_id", "decoder_start_token_id",
    "eol_token_id", "max_sequence_length", "model_max_length", "tokenizer_model_max_length", "n_ctx",
    "id2label", "label2id", "num_labels", "num_choices", "problem_type", "finetuning_task",
    "task_specific_params", "classifier_dropout", "neftune_noise_alpha", "embd_pdrop", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    # generation, which older files have here and not in generation_config.json
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "do_sample", "early_stopping",
    "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "min_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "bad_words_ids", "num_return_sequences",
    "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens", "epsilon_cutoff", "eta_cutoff", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "target_lookbehind",
}  # fmt: skip
# PaddleNLP's and PaddleFormers' parallelism, kernels and training. Which tensors are fused, the tensors say
# themselves.
_OF_PADDLE = {
    "paddlenlp_version", "paddleformers_version",
    "seq_length", "use_recompute", "recompute", "recompute_granularity", "recompute_use_reentrant",
    "no_recompute_layers", "pp_recompute_interval", "use_flash_attention", "fuse_attention_qkv",
    "fuse_attention_ffn", "fuse_linear", "fuse_rms_norm", "use_fused_rms_norm", "use_fused_rope",
    "fuse_swiglu", "apply_rope_fusion", "rope_fusion_level", "tensor_parallel_degree",
    "tensor_parallel_rank", "tensor_parallel_output", "tensor_model_parallel_size", "sequence_parallel",
    "fuse_sequence_parallel_allreduce", "virtual_pp_degree", "pipeline_parallel_degree",
    "sep_parallel_degree", "context_parallel_degree", "sep_parallel_size", "context_parallel_size",
    "pipeline_model_parallel_size", "use_single_model_implementation", "ignored_index",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "dpo_config", "kto_config",
    "use_last_token_for_generation", "immediate_clear_past_key_value",
}  # fmt: skip
# The value at which an option is not there.
_SWITCHED_OFF: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, []),
    "per_layer_config": ({},),
    "quantization_config": ({},),
    "auto_map": ({},),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "lm_head_bias": (False,),
    "rope_interleaved": (False,),
    "alibi": (False,),
    "rope_scaling_factor": (1, 1.0),
    "rope_scaling_type": (),
    "scale_qk_coeff": (1, 1.0),
    "use_rmsnorm": (True,),
    "use_long_sequence_strategies": (False,),
}
_OF_ONE_FAMILY: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {"scale_attn_by_inverse_layer_idx": (False,), "scale_attn_weights": (True,)},
    "llama": {"hidden_act": ("silu", "swish")},
}
_WHY = {
    "quantization_config": "its weights are quantized",
    "auto_map": "its network is a program of its own. Without auto_map it is read as what model_type says",
}
_LAYER_KINDS = {"layer_types": "full_attention", "mlp_layer_types": "dense"}


def model_keys(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of our ``Model`` section for a Hugging Face ``config.json``.

    Dropout is taken over for GPT-2 where it is one probability for all residual branches.

    Raises:
        CheckpointError: a model type, an option or a key that our layers do not have, or an impossible value.
    """
    kind = hf_config.get("model_type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise CheckpointError(
            f"model_type {shown(kind)} is not supported; those that are: {', '.join(_KEYS)}"
        )
    check_values(hf_config)
    config = {key: value for key, value in hf_config.items() if value is not None}
    _classify(config, kind)
    return _KEYS[kind](config)


def of_paddle(config: Mapping[str, Any]) -> bool:
    """Whether PaddleNLP or PaddleFormers says that it wrote a configuration."""
    return any(mark in config for mark in ("paddlenlp_version", "paddleformers_version"))


def without_paddle(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` for transformers: what Paddle's libraries alone write there is taken out, what they
    leave out is put in.

    Args:
        config: one that :func:`model_keys` accepts.
        keys: what it made of it.
    """
    if _OF_PADDLE.isdisjoint(config):
        return dict(config)
    kept = {key: value for key, value in config.items() if key not in _OF_PADDLE | _SWITCHED_OFF.keys()}
    return kept | {"tie_word_embeddings": keys["tie_word_embeddings"]}


def _classify(config: Mapping[str, Any], kind: str) -> None:
    """Raise CheckpointError unless every key is mapped, without effect or switched off."""
    off = _SWITCHED_OFF | _OF_ONE_FAMILY[kind]
    unknown = []
    for key, value in config.items():
        if key in _LAYER_KINDS:
            if not isinstance(value, list) or any(one != _LAYER_KINDS[key] for one in value):
                raise CheckpointError(f"{key}: {shown(value)} of this {kind} is not supported")
        elif key in off:
            if not any(type(value) is type(one) and value == one for one in off[key]):
                why = f": {_WHY[key]}" if key in _WHY else ""
                raise CheckpointError(f"{key}: {shown(value)} of this {kind} is not supported{why}")
        elif key not in _MAPPED[kind] | _WITHOUT_EFFECT | _OF_PADDLE:
            unknown.append(shown(key))
    if unknown:
        raise CheckpointError(
            f"config.json has keys that are not known for a {kind}: {', '.join(sorted(unknown)[:8])}. What "
            "they change would be lost; take out those that change nothing"
        )


def _gpt2_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(given)
    for alias, name in _GPT2_ALIASES.items():
        if alias in config and config.setdefault(name, config[alias]) != config[alias]:
            one, two = shown(config[alias]), shown(config[name])
            raise CheckpointError(f"config.json: {alias} ({one}) and {name} ({two}) are one size")
    activation = config.get("activation_function", "gelu_new")
    if activation not in _GPT2_ACTIVATIONS:
        raise CheckpointError(f"activation_function {shown(activation)} of this GPT-2 is not supported")
    hidden, heads = _needed(config, "n_embd"), _needed(config, "n_head")
    return {
        "vocab_size": _needed(config, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": _needed(config, "n_layer"),
        "num_attention_heads": heads,
        "ffn_hidden_size": config.get("n_inner", 4 * hidden),
        "max_position_embeddings": _needed(config, "n_positions"),
        "hidden_act": _GPT2_ACTIVATIONS[activation],
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "initializer_range": config.get("initializer_range", 0.02),
        "hidden_dropout_prob": config.get("resid_pdrop", 0.1),
        "attention_probs_dropout_prob": config.get("attn_pdrop", 0.1),
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
        "add_bias_linear": True,
    }


def _llama_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = _needed(config, "hidden_size"), _needed(config, "num_attention_heads")
    if "head_dim" not in config and hidden % heads:
        raise CheckpointError(f"config.json: {heads} heads do not divide the hidden size {hidden}")
    attention_bias = config.get("attention_bias", False)
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
        "add_qkv_bias": attention_bias,
        "add_out_proj_bias": attention_bias,
        "add_mlp_bias": config.get("mlp_bias", False),
    }


_KEYS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"gpt2": _gpt2_keys, "llama": _llama_keys}


def _needed(config: Mapping[str, Any], key: str) -> Any:
    if key not in config:
        raise CheckpointError(f"config.json lacks {key}")
    return config[key]
