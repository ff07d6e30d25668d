"""Convert a Hugging Face ``config.json`` to our ``Model`` section. Unknown keys are ignored. A key of an
unsupported feature is accepted only if its value turns the feature off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.config.field_annotations import annotation_at, describe
from ppfleetx.config.resume_policy import network
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.validate import section_of
from ppfleetx.conversion.huggingface.families import FAMILIES
from ppfleetx.conversion.huggingface.family import Family, value_at
from ppfleetx.conversion.huggingface.generation_config import KEYS as GENERATION_KEYS
from ppfleetx.conversion.huggingface.gptq_awq import QUANTIZATION, quantization

# Keys that do not affect the logits: origin, storage, runtime, generation and others.
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
    "predict_special_tokens", "_num_labels", "max_window_layers", "custom_pipelines", "output_past",
    "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "bias_dropout_fusion",
    "masked_softmax_fusion", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv",
    "auto_map",  # ignored, as in transformers without trust_remote_code; directory.py warns
    *GENERATION_KEYS,  # older files have them here
    QUANTIZATION,  # checked separately
}  # fmt: skip
# PaddleNLP's and PaddleFormers' keys for parallelism, kernels and training. The fuse_* keys are not needed:
# fused tensors are recognized by name.
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
# Option -> the values that turn it off. null always turns an option off.
_SWITCHED_OFF: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "is_encoder_decoder": (False,),
    "is_causal": (True,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, []),
    "per_layer_config": ({},),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "lm_head_bias": (False,),
    "rope_interleaved": (False,),
    "alibi": (False,),
    "rope_scaling_factor": (1, 1.0),
    "rope_scaling_type": (),
    "scale_qk_coeff": (1, 1.0),
    "scale_attn_weights": (True,),
    "use_rmsnorm": (True,),
    "use_long_sequence_strategies": (False,),
}
# Options of networks that we do not support. They are accepted only if false, 0 or empty.
_OF_OTHER_NETWORKS = {
    # experts
    "moe_num_experts", "moe_layer_freq", "swiglu_limit",
    # attention
    "qk_norm", "qk_layernorm", "clip_qkv", "attn_logit_softcapping", "query_pre_attn_scalar",
    "attention_multiplier", "use_mrope", "mrope_section", "multi_query", "new_decoder_architecture",
    "attention_chunk_size", "attention_types", "window_size", "sliding_window_pattern",
    "global_attn_every_n_layers", "attn_config",
    "use_bidirectional_attention", "prefix_lm", "num_kv_shared_layers", "use_alibi", "attention_sinks",
    # positions
    "no_rope_layers", "no_rope_layer_interval", "rotary_dim", "rotary_percent", "rope_pct", "rope_ratio",
    "rope_base", "rope_local_base_freq",
    # biases, norms, residual branches, activations
    "bias", "use_bias", "use_qkv_bias", "add_qkv_bias", "add_bias_linear", "attention_out_bias",
    "attention_output_bias", "parallel_attn", "sandwich_norm", "post_norm", "use_post_norm", "norm_after",
    "norm_type", "norm_eps", "norm_epsilon", "rms_norm", "hidden_activation", "ffn_type", "mlp_type",
    # scales
    "logit_scale", "final_logit_softcapping", "scale_depth", "dim_model_base", "scale_embedding", "use_mup",
    "mup_width_scale", "mup_attn_multiplier", "mup_embeddings_scale", "mup_output_alpha",
    # vocabularies and inputs
    "n_special", "embedding_size", "word_embed_proj_dim", "hidden_size_per_layer_input", "vision_config",
    "audio_config", "text_config",
    # other kinds of blocks, and quantized weights
    "attn_layer_period", "hybrid_override_pattern", "ssm_cfg", "state_size", "quantization",
    "compression_config",
}  # fmt: skip
# Factors in networks that we do not support. They are accepted if 1.
_FACTORS = {"scale_emb", "embedding_multiplier", "residual_multiplier", "logits_scaling", "rope_ratio"}
_SAME_AS_NONE: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope", "rotary"),
}
_LAYER_KINDS = {"layer_types": "full_attention", "mlp_layer_types": "dense"}
_REFUSED = {
    "gpt_oss": "each of its attention heads has a sink, a learned logit that takes part of the softmax; its "
    "experts clamp what goes into their gate; and every second layer has a window. None of these is built",
}
"""Popular model type that we do not support -> the reason."""


def model_keys(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a Hugging Face ``config.json`` to keys of our ``Model`` section. Raises CheckpointError if the
    model type, an option or a value is not supported."""
    kind = hf_config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        others = f"; supported: {', '.join(FAMILIES)}"
        why = f": {_REFUSED[kind]}" if isinstance(kind, str) and kind in _REFUSED else others
        raise CheckpointError(f"model_type {shown(kind)} is not supported{why}")
    family = FAMILIES[kind]
    if absent := [key for key in family.required if key not in hf_config]:
        raise CheckpointError(f"config.json lacks {', '.join(absent)}")
    config = family.without_aliases({key: value for key, value in hf_config.items() if value is not None})
    _check_values(config, family)
    quantization(config)
    _refuse_unsupported(config, kind, family)
    return family.model_keys(config)


def _check_values(config: Mapping[str, Any], family: Family) -> None:
    """Raise CheckpointError if a key in ``config.json`` has a value that the corresponding key of our
    ``Model`` section does not accept."""
    for key in family.keys.keys() & config.keys():
        kind = annotation_at(ModelConfig, family.keys[key][0].split()[0].split("."))
        try:
            TypeAdapter(kind).validate_python(config[key])
        except ValidationError:
            text = f"{key} = {shown(config[key])} in config.json: must be {describe(kind)}"
            raise CheckpointError(text) from None


def of_paddle(config: Mapping[str, Any]) -> bool:
    """Return whether PaddleNLP or PaddleFormers wrote a ``config.json``."""
    return any(mark in config for mark in ("paddlenlp_version", "paddleformers_version"))


def without_paddle_keys(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a ``config.json`` without keys that only Paddle's libraries use.

    If it has such keys, two more things change. Unsupported options that are turned off are removed.
    ``tie_word_embeddings`` is written explicitly, because Paddle's libraries may omit it.

    Args:
        keys: the result of :func:`model_keys` for ``config``.
    """
    mapped = FAMILIES[config["model_type"]].mapped  # such as the seq_length of Bloom
    if (_OF_PADDLE - mapped).isdisjoint(config):
        return dict(config)
    left_out = (_OF_PADDLE | _SWITCHED_OFF.keys()) - mapped
    kept = {key: value for key, value in config.items() if key not in left_out}
    # Paddle's libraries may omit tie_word_embeddings.
    return kept | {"tie_word_embeddings": keys["tie_word_embeddings"]}


def unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the sorted keys of a ``config.json`` that :func:`model_keys` ignores because they are
    unknown."""
    family = FAMILIES[config["model_type"]]
    known = {*family.mapped, *family.off, *_SWITCHED_OFF, *_LAYER_KINDS, *_WITHOUT_EFFECT, *_OF_PADDLE}
    return sorted(
        key
        for key, value in config.items()
        if value is not None and key not in known and not _is_of_other_networks(key)
    )


def _is_of_other_networks(key: str) -> bool:
    return key in _OF_OTHER_NETWORKS | _FACTORS | _SAME_AS_NONE.keys() | _OF_FAMILIES or key.startswith(
        "mamba_"
    )


# A key that one family reads is refused by all other families, unless its value turns the feature off.
_OF_FAMILIES = {key for family in FAMILIES.values() for key in (*family.mapped, *family.off)}


def _refuse_unsupported(config: Mapping[str, Any], kind: str, family: Family) -> None:
    """Raise CheckpointError if ``config`` turns on an unsupported feature. Keys that ``family`` converts are
    not checked here."""
    off = _SWITCHED_OFF | family.off
    for key, value in config.items():
        if key in family.mapped:
            continue
        if key in _LAYER_KINDS:
            refused = not isinstance(value, list) or any(one != _LAYER_KINDS[key] for one in value)
        elif key in off:
            refused = not any(type(value) is type(one) and value == one for one in off[key])
        elif key in _WITHOUT_EFFECT or key in _OF_PADDLE or not _is_of_other_networks(key):
            refused = False
        else:
            refused = bool(value) and not _changes_nothing(key, value, config, family)
        if refused:
            raise CheckpointError(f"{key}: {shown(value)} of this {kind} is not supported")


def _changes_nothing(key: str, value: Any, config: Mapping[str, Any], family: Family) -> bool:
    """Return whether the network would be the same if ``config`` did not have ``key``. An example is a
    ``head_dim`` that equals ``hidden_size / num_attention_heads``."""
    if value in _SAME_AS_NONE.get(key, ()) or (key in _FACTORS and value == 1):
        return True
    ours = {name for one in FAMILIES.values() if key in one.keys for name in one.keys[key][0].split()}
    if not ours:
        return False
    has = network(section_of(ModelConfig, family.model_keys(config)))
    return all(value_at(has, name) == value for name in ours)
