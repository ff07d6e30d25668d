"""Every key of a Hugging Face ``config.json``, and what becomes of it: our ``Model`` section, nothing, or a
refusal. NumPy only.

A key either is mapped to one of ours, or has no effect on what the network computes, or is accepted at the
value that switches it off. Any other key is refused by name, because a network with an option that was not
read is another network. null is "not given" everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.models.gpt.hf_families import FAMILIES, Family
from ppfleetx.models.gpt.hf_values import check_values

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
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"model_type {shown(kind)} is not supported; those that are: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    check_values(hf_config)
    if absent := [key for key in family.needed if key not in hf_config]:
        raise CheckpointError(f"config.json lacks {', '.join(absent)}")
    config = {key: value for key, value in hf_config.items() if value is not None}
    _classify(config, kind, family)
    return family.keys(config)


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


def _classify(config: Mapping[str, Any], kind: str, family: Family) -> None:
    """Raise CheckpointError unless every key is mapped, without effect or switched off."""
    off = _SWITCHED_OFF | family.off
    unknown = []
    for key, value in config.items():
        if key in family.mapped:
            continue
        if key in _LAYER_KINDS:
            if not isinstance(value, list) or any(one != _LAYER_KINDS[key] for one in value):
                raise CheckpointError(f"{key}: {shown(value)} of this {kind} is not supported")
        elif key in off:
            if not any(type(value) is type(one) and value == one for one in off[key]):
                why = f": {_WHY[key]}" if key in _WHY else ""
                raise CheckpointError(f"{key}: {shown(value)} of this {kind} is not supported{why}")
        elif key not in _WITHOUT_EFFECT | _OF_PADDLE:
            unknown.append(shown(key))
    if unknown:
        raise CheckpointError(
            f"config.json has keys that are not known for a {kind}: {', '.join(sorted(unknown)[:8])}. What "
            "they change would be lost; take out those that change nothing"
        )
