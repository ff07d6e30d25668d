"""Whole configurations, but of another toolkit: named as such, instead of unknown key by key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.synonyms import our_key
from ppfleetx.config.tree import Node

_ENOUGH = 2  # keys of a toolkit that tell it
_MAX_TRANSLATED = 12
_KEYS_HERE = (
    "Sections and keys of this program are in docs/config.md; start from a file of ppfleetx/configs/."
)


@dataclass(frozen=True)
class _Toolkit:
    """A toolkit, top-level keys that are in its files, and what to do with one of them."""

    name: str
    keys: frozenset[str]
    advice: str = _KEYS_HERE


def _toolkit(name: str, keys: str, advice: str = _KEYS_HERE) -> _Toolkit:
    return _Toolkit(name, frozenset(keys.split()), advice)


# Where a file fits several, the first that it fits best is named.
_TOOLKITS = (
    _toolkit(
        "the config.json of a Hugging Face checkpoint",
        "model_type architectures transformers_version torch_dtype n_embd n_layer n_head num_hidden_layers "
        "hidden_act bos_token_id eos_token_id initializer_range rope_theta rope_scaling rms_norm_eps "
        "layer_norm_epsilon use_cache",
        "Convert the checkpoint: python tools/convert_checkpoint.py --from hf --to ppfleetx --input DIR "
        "--output NEW; the config.yaml in NEW is a configuration.",
    ),
    _toolkit(
        "a MindFormers configuration",
        "runner_config runner_wrapper parallel_config train_dataset_task eval_dataset_task recompute_config "
        "auto_trans_ckpt use_parallel processor train_dataset eval_dataset lr_schedule callbacks "
        "parallel_context context only_save_strategy micro_batch_interleave_num base_config",
    ),
    _toolkit(
        "a MindSpeed configuration",
        "train_config accelerate_config model_config mm_model dataset_param dataloader_param gpt_args "
        "ms_training_config mindspeed",
    ),
    _toolkit(
        "a DeepSpeed configuration",
        "train_batch_size train_micro_batch_size_per_gpu zero_optimization gradient_clipping steps_per_print "
        "wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients "
        "activation_checkpointing flops_profiler",
    ),
    _toolkit(
        "a PaddleNLP or PaddleFormers configuration",
        "tensor_parallel_degree pipeline_parallel_degree sharding_parallel_degree sep_parallel_degree "
        "context_parallel_degree virtual_pp_degree sharding_parallel_config tensor_parallel_config "
        "pipeline_parallel_config unified_checkpoint fuse_attention_qkv fuse_attention_ffn fp16_opt_level "
        "amp_master_grad sequence_parallel",
    ),
    _toolkit(
        "a configuration of Hugging Face's Trainer or a program built on it",
        "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps num_train_epochs "
        "save_total_limit finetuning_type evaluation_strategy eval_strategy lr_scheduler_type warmup_ratio "
        "logging_steps deepspeed dataset_dir template report_to",
    ),
    _toolkit(
        "a NeMo configuration",
        "trainer exp_manager restore_from_path resume_from_checkpoint megatron_amp_O2",
    ),
    _toolkit(
        "a GPT-NeoX configuration",
        "pipe_parallel_size model_parallel_size train_iters lr_decay_iters seq_length num_layers hidden_size "
        "num_attention_heads max_position_embeddings norm pos_emb no_weight_tying attention_config",
    ),
    _toolkit(
        "a file of Megatron-LM's arguments",
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size language_model "
        "model_parallel train_iters lr_decay_iters lr_decay_style lr_warmup_iters lr_warmup_fraction "
        "make_vocab_size_divisible_by eval_iters eval_interval seq_length micro_batch_size global_batch_size "
        "num_layers hidden_size num_attention_heads ffn_hidden_size max_position_embeddings "
        "use_distributed_optimizer transformer_impl data_path clip_grad",
    ),
)

_ARGUMENT = re.compile(r"(?<![\w-])--([a-z][a-z0-9_-]{1,60})")
_MEGATRON_ARGUMENTS = _toolkit(
    "Megatron-LM",
    "tensor_model_parallel_size pipeline_model_parallel_size num_layers hidden_size num_attention_heads "
    "micro_batch_size global_batch_size seq_length max_position_embeddings train_iters lr_decay_iters "
    "context_parallel_size data_path save_interval",
).keys


def refuse_foreign(tree: Node, sections: frozenset[str]) -> None:
    """Raise when ``tree`` has no section of ours but the keys of another toolkit.

    Args:
        tree: the mapping of a file.
        sections: names of our sections.

    Raises:
        ConfigError: naming the toolkit, the keys that tell it, and what other keys are called here.
    """
    keys = {_plain(key) for key in tree.value}
    if not sections.isdisjoint(tree.value):
        return
    toolkit = max(_TOOLKITS, key=lambda one: len(one.keys & keys))
    telling = sorted(toolkit.keys & keys)
    if len(telling) < _ENOUGH:
        return
    raise ConfigError(
        f"this is {toolkit.name} ({', '.join(telling[:4])}), not one of this program.",
        place=tree.place,
        hint=toolkit.advice + _translated(_all_keys(tree)),
    )


def refuse_foreign_text(text: str, place: str) -> None:
    """Raise when ``text``, which is no mapping in YAML, holds arguments of Megatron-LM or MindSpeed.

    Raises:
        ConfigError: see :func:`refuse_foreign`.
    """
    given = dict.fromkeys(_plain(name) for name in _ARGUMENT.findall(text))
    if len(_MEGATRON_ARGUMENTS.intersection(given)) < _ENOUGH:
        return
    name = "MindSpeed" if "mindspeed" in text.lower() else "Megatron-LM"
    raise ConfigError(
        f"this holds command-line arguments of {name}, and is not a configuration of this program.",
        place=place,
        hint=_KEYS_HERE + _translated(given),
    )


def _plain(key: str) -> str:
    return key.replace("-", "_").lower()


def _all_keys(tree: Node) -> Iterator[str]:
    for key, node in tree.value.items():
        yield key
        if isinstance(node.value, dict):
            yield from _all_keys(node)


def _translated(keys: Iterator[str] | dict[str, None]) -> str:
    """What the keys among ``keys`` that have a like here are called, as lines to be appended."""
    pairs = {key: ours for key in keys if (ours := our_key(key)) is not None}
    if not pairs:
        return ""
    shown = [f"\n  {key} is {ours}" for key, ours in list(pairs.items())[:_MAX_TRANSLATED]]
    return " What is called otherwise here:" + "".join(shown)
