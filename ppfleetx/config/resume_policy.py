"""Classify each configuration key by what it affects and whether a resumed run may change the key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ppfleetx.config.field_annotations import all_keys, annotation_at, field_types, section_in
from ppfleetx.config.section import Section
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.root import RunConfig


class Effect(Enum):
    """What a configuration key affects, and what happens if a resumed run changes the key."""

    SHAPE = "Which parameters there are. Weights that do not fit are refused."
    FUNCTION = (
        "What given weights compute. Weights trained with another value are refused, in evaluation and "
        "generation and as the start of a new run too; but a new run may start from weights with another "
        "`rotary_base` or `rope_scaling`, to learn longer sequences, and the log names it."
    )
    DATA = (
        "Which samples are read, in which order. Refused where it changes them, unless "
        "`Engine.save_load.reset_data` starts the data from the beginning; another tokenizer is always "
        "refused."
    )
    SCHEDULE = (
        "Learning rate and weight decay of each step. `Engine.save_load.lr_schedule` decides between the "
        "checkpoint's and the configuration's."
    )
    OPTIMIZER = "The states of the optimizer. Refused unless `Engine.save_load.load_optim` is False."
    TRAINING = "What the next steps compute. It may change; the log names it."
    EVALUATION = "What an evaluation measures. It may change; the log names it."
    NOTHING = (
        "Speed, memory, length, places and messages. Results are equal but for rounding and, where plan or "
        "micro batch change, the masks of dropout."
    )


def _table(effect: Effect, section: str, names: str) -> dict[str, Effect]:
    return {f"{section}.{name}": effect for name in names.split()}


# A section stands for all its keys, except keys that have entries of their own.
_EFFECTS: dict[str, Effect] = {
    **_table(
        Effect.SHAPE,
        "Model",
        "module vocab_size hidden_size num_layers ffn_hidden_size max_position_embeddings "
        "add_bias_linear add_qkv_bias add_out_proj_bias add_mlp_bias add_head_bias num_classes lora.rank "
        "position_offset embedding_norm shared_input_norm pre_norm "
        "lora.targets moe.num_experts moe.expert_ffn_size moe.first_dense_layers moe.layer_freq moe.layers "
        "moe.router.bias moe.shared_experts",
    ),
    **_table(
        Effect.FUNCTION,
        "Model",
        "name num_attention_heads num_query_groups head_dim hidden_act position_embedding_type rotary_base "
        "rotary_percent rotary_interleaved rope_scaling local_rotary_base rotary_layers latent_attention "
        "attention_window attention_window_layers attention_multiplier attn_logit_softcapping "
        "final_logit_softcapping embedding_multiplier residual_multiplier logits_multiplier normalization "
        "norm_epsilon qk_layernorm parallel_residual sandwich_norm tie_word_embeddings lora.alpha lora.base "
        "mup_base_width moe",
    ),
    **_table(
        Effect.TRAINING,
        "Model",
        "hidden_dropout_prob embedding_dropout_prob attention_probs_dropout_prob scale_qk_by_layer_num "
        "softmax_in_fp32 lora.dropout moe.router.jitter moe.aux_loss moe.z_loss_weight "
        "moe.bias_update_rate moe.capacity",
    ),
    # Padding, initial values, kernels, recomputation and the plan.
    **_table(
        Effect.NOTHING,
        "Model",
        "vocab_size_divisible_unit attn_post_norm_scale ffn_post_norm_scale initializer_range "
        "embedding_initializer_range "
        "scale_output_init attention_kernel use_flash_attn fused_linear fused_ops fuse_attn_qkv "
        "use_recompute "
        "recompute_granularity recompute_layers no_recompute_layers recompute_interval sequence_parallel "
        "virtual_pp_degree loss_chunks",
    ),
    **_table(Effect.OPTIMIZER, "Optimizer", "name"),
    **_table(Effect.TRAINING, "Optimizer", "beta1 beta2 epsilon options grad_clip muon groups layer_decay"),
    **_table(Effect.SCHEDULE, "Optimizer", "weight_decay lr weight_decay_schedule"),
    **_table(
        Effect.DATA,
        "Data.Train.dataset",
        "name options input_dir weights blend split max_seq_len prompt_field response_field seed",
    ),
    **_table(
        Effect.TRAINING,
        "Data.Train.dataset",
        "reset_position_ids reset_attention_mask eod_mask_loss eod_id",
    ),
    **_table(Effect.NOTHING, "Data.Train.dataset", "cache_dir verify"),
    **_table(Effect.DATA, "Data.Train.sampler", "name shuffle"),
    **_table(Effect.NOTHING, "Data.Train.sampler", "drop_last"),
    **_table(
        Effect.EVALUATION,
        "Data.Eval.dataset",
        "name options input_dir weights blend split max_seq_len prompt_field response_field seed "
        "reset_position_ids reset_attention_mask eod_mask_loss eod_id",
    ),
    **_table(Effect.NOTHING, "Data.Eval.dataset", "cache_dir verify"),
    **_table(Effect.EVALUATION, "Data.Eval", "sampler.name sampler.shuffle sampler.drop_last sets"),
    **_table(Effect.NOTHING, "Data", "Train.loader Eval.loader Test"),
    **_table(Effect.DATA, "Data.tokenizer", "name dir tokenizer_file vocab_file merges_file"),
    **_table(Effect.TRAINING, "Data.tokenizer", "eos_token"),
    **_table(
        Effect.TRAINING, "Global", "seed global_batch_size rampup_batch_size rampup_seq_len allow_tf32 flags"
    ),
    **_table(Effect.NOTHING, "Global", "device local_batch_size micro_batch_size plugins card peak_tflops"),
    **_table(
        Effect.TRAINING,
        "Engine.mix_precision",
        "enable dtype level scale_loss use_dynamic_loss_scaling incr_every_n_steps hysteresis main_grad_fp32 "
        "custom_black_list custom_white_list",
    ),
    **_table(Effect.TRAINING, "Engine", "spike"),
    **_table(Effect.EVALUATION, "Engine", "eval_iters save_load.keep_best"),
    **_table(
        Effect.NOTHING,
        "Engine",
        "max_steps num_train_epochs run_mode accumulate_steps logging_freq log_source_loss eval_freq "
        "test_iters save_load checks hang_timeout hang_start_timeout on_hang straggler_freq progress_bar "
        "loggers callbacks",
    ),
    **dict.fromkeys(
        ("Distributed", "Generation", "Inference", "Serve", "Offline_Eval", "Profiler"),
        Effect.NOTHING,
    ),
    "Compress": Effect.TRAINING,
}

# Properties of ModelConfig that return the effective value of a key, e.g. where the key is null.
_EFFECTIVE = {
    "num_query_groups": "kv_heads",
    "head_dim": "head_size",
    "ffn_hidden_size": "ffn_size",
    "moe": "normalized_moe",
    "logits_multiplier": "logits_factor",
    "add_qkv_bias": "has_qkv_bias",
    "add_out_proj_bias": "has_out_proj_bias",
    "add_mlp_bias": "has_mlp_bias",
    "add_head_bias": "has_head_bias",
}
# Keys with the effects SHAPE or FUNCTION that do not describe the network itself.
_OUTSIDE_NETWORK = ("module", "add_bias_linear", "num_classes", "lora", "mup_base_width")


@dataclass(frozen=True)
class Change:
    """A key whose value differs between two configurations, with its values ``then`` and ``now``."""

    key: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} = {_shown(self.now)} (was {_shown(self.then)})"


def effect_of(key: str) -> Effect:
    """Return the effect of the dotted ``key``, or of the nearest section around it that is in the table.
    Raises KeyError if there is none."""
    found: str | None = key
    while found:
        if found in _EFFECTS:
            return _EFFECTS[found]
        found = found.rpartition(".")[0]
    raise KeyError(key)


def keys_of(effect: Effect) -> list[str]:
    """List the keys that have the effect ``effect``.

    A section in the list stands for all its keys that have no entry of their own in the table.
    """
    return [key for key, found in _EFFECTS.items() if found is effect]


def leaf_keys() -> list[str]:
    """List the dotted names of all keys of a configuration that hold a value rather than a section."""
    keys = all_keys(RunConfig)
    return [key for key in keys if section_in(annotation_at(RunConfig, key.split("."))) is None]


def network(
    model: ModelConfig, effects: Collection[Effect] = (Effect.SHAPE, Effect.FUNCTION)
) -> dict[str, Any]:
    """Return the keys and values of section ``Model`` that determine the network, without adapters.

    Only keys with one of the ``effects`` are returned. A null is replaced by the value that it stands for. A
    key that this model does not use, such as ``rotary_base`` without rotary positions, has the value None.
    Two models have the same network if these mappings are equal.
    """
    without_effect = set()
    if not model.positions.rotates:
        without_effect.update(("rotary_base", "rotary_percent", "rotary_interleaved"))
    if not model.positions.has_table:
        without_effect.add("max_position_embeddings")
    return {
        key: None if key in without_effect else getattr(model, _EFFECTIVE.get(key, key))
        for key in type(model).model_fields
        if key not in _OUTSIDE_NETWORK and effect_of(f"Model.{key}") in effects
    }


def first_difference(key: str, then: Any, now: Any) -> Change:
    """Return the first difference between two values of ``key``. Sections are compared key by key."""
    while isinstance(then, Section) and isinstance(now, Section):
        name = next(name for name in type(then).model_fields if getattr(then, name) != getattr(now, name))
        key, then, now = f"{key}.{name}", getattr(then, name), getattr(now, name)
    return Change(key, then, now)


def changes(saved: Mapping[str, Any], cfg: RunConfig, effects: Collection[Effect]) -> list[Change]:
    """List the keys whose values differ between a checkpoint and ``cfg``, with both values.

    ``saved`` is the configuration in the checkpoint's manifest. A key that is missing there has its default.
    Only keys with one of the ``effects`` are compared.
    """
    now = cfg.model_dump(mode="json")
    pairs = (_pair(saved, now, key) for key in leaf_keys() if effect_of(key) in effects)
    return list({pair.key: pair for pair in pairs if pair.then != pair.now}.values())


def _pair(saved: Any, now: Any, key: str) -> Change:
    """Return ``key`` with its values in the configurations ``saved`` and ``now``. If a section around ``key``
    is null in one of them, return that section with its two values instead."""
    section: type[Section] = RunConfig
    path = []
    for name in key.split("."):
        if saved is None or now is None:
            break
        path.append(name)
        saved, now = (_child(tree, section, name) for tree in (saved, now))
        section = section_in(field_types(section)[name]) or section
    return Change(".".join(path), saved, now)


def _child(tree: Mapping[str, Any], section: type[Section], name: str) -> Any:
    if name in tree:
        return tree[name]
    field = section.model_fields[name]
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if isinstance(default, Section):
        return default.model_dump(mode="json")
    return list(default) if isinstance(default, tuple) else default


def _shown(value: Any) -> str:
    return "{...}" if isinstance(value, Mapping) and value else repr(value)
