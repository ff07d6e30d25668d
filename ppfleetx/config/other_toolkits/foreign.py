"""Whole configurations, but of another toolkit: named as such, instead of unknown key by key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.other_toolkits.synonyms import our_key
from ppfleetx.config.reading.tree import Node

_ENOUGH = 2  # keys of a toolkit, one of them telling
_MAX_TRANSLATED = 12
_KEYS_HERE = (
    "Sections and keys of this program are in docs/config.md; start from a file of ppfleetx/configs/."
)


@dataclass(frozen=True)
class _Toolkit:
    """A toolkit, and what to do with one of its files.

    ``telling`` are top-level keys that are in its files and hardly in others, ``usual`` further ones.
    """

    name: str
    telling: frozenset[str]
    usual: frozenset[str]
    advice: str = _KEYS_HERE


def _toolkit(name: str, telling: str, usual: str, advice: str = _KEYS_HERE) -> _Toolkit:
    return _Toolkit(name, frozenset(telling.split()), frozenset(usual.split()), advice)


def _runs(program: str, page: str) -> str:
    return (
        f"It runs as it is: python projects/{program}. To have it as one of this program: ppfleetx "
        f"translate FILE --to OURS.yaml (docs/dialects/{page}.md)."
    )


# The first that fits is named: those with keys of their own stand before those whose keys others took over.
_TOOLKITS = (
    _toolkit(
        "the config.json of a Hugging Face checkpoint",
        "model_type architectures transformers_version n_embd n_layer num_hidden_layers",
        "torch_dtype n_head hidden_size hidden_act vocab_size bos_token_id eos_token_id initializer_range "
        "rope_theta rope_scaling rms_norm_eps layer_norm_epsilon use_cache num_attention_heads",
        "Convert the checkpoint: ppfleetx convert --from hf --to ppfleetx --input DIR "
        "--output NEW; the config.yaml in NEW is a configuration.",
    ),
    _toolkit(
        "a MindFormers configuration",
        "runner_config runner_wrapper parallel_config train_dataset_task recompute_config auto_trans_ckpt "
        "only_save_strategy micro_batch_interleave_num",
        "use_parallel processor train_dataset eval_dataset lr_schedule callbacks context trainer model "
        "moe_config base_config run_mode",
        "GPT-2 runs as it is: python projects/mindformers/run_mindformer.py --config FILE. To have it as one "
        "of this program: ppfleetx translate FILE --to OURS.yaml (docs/dialects/mindformers.md).",
    ),
    _toolkit(
        "a MindSpeed configuration",
        "accelerate_config ms_training_config mm_model gpt_args",
        "train_config model_config dataset_param dataloader_param mindspeed",
        _runs("mindspeed/pretrain_gpt.py --yaml-cfg FILE", "mindspeed"),
    ),
    _toolkit("a NeMo configuration", "exp_manager megatron_amp_o2", "trainer model restore_from_path name"),
    _toolkit(
        "a GPT-NeoX configuration",
        "pipe_parallel_size pos_emb no_weight_tying attention_config",
        "model_parallel_size train_iters lr_decay_iters seq_length num_layers hidden_size "
        "num_attention_heads norm zero_optimization train_micro_batch_size_per_gpu",
    ),
    _toolkit(
        "a PaddleNLP or PaddleFormers configuration",
        "tensor_parallel_degree pipeline_parallel_degree sharding_parallel_degree sharding_parallel_config "
        "tensor_parallel_config pipeline_parallel_config unified_checkpoint fuse_attention_qkv "
        "fuse_attention_ffn amp_master_grad",
        "model_name_or_path sharding sequence_parallel virtual_pp_degree fp16_opt_level do_train "
        "per_device_train_batch_size gradient_accumulation_steps output_dir max_steps",
        _runs("paddleformers/run_pretrain.py FILE", "paddleformers"),
    ),
    _toolkit(
        "a DeepSpeed configuration",
        "zero_optimization train_micro_batch_size_per_gpu zero_allow_untested_optimizer "
        "zero_force_ds_cpu_optimizer wall_clock_breakdown flops_profiler",
        "train_batch_size gradient_clipping steps_per_print prescale_gradients activation_checkpointing fp16 "
        "bf16 optimizer scheduler gradient_accumulation_steps",
        "It goes with Megatron's arguments: python projects/megatron/pretrain_gpt.py --deepspeed "
        "--deepspeed_config FILE ... (docs/dialects/megatron.md).",
    ),
    _toolkit(
        "a file of Megatron-LM's arguments",
        "tensor_model_parallel_size pipeline_model_parallel_size language_model train_iters lr_decay_iters "
        "lr_warmup_iters lr_warmup_fraction make_vocab_size_divisible_by use_distributed_optimizer",
        "model_parallel context_parallel_size lr_decay_style eval_iters eval_interval seq_length data_path "
        "micro_batch_size global_batch_size num_layers hidden_size num_attention_heads ffn_hidden_size "
        "max_position_embeddings transformer_impl clip_grad",
        "To have it as one of this program: ppfleetx translate FILE --to OURS.yaml "
        "(docs/dialects/megatron.md).",
    ),
    _toolkit(
        "a configuration of Hugging Face's Trainer or a program built on it",
        "per_device_train_batch_size per_device_eval_batch_size finetuning_type evaluation_strategy "
        "eval_strategy lr_scheduler_type",
        "gradient_accumulation_steps num_train_epochs save_total_limit warmup_ratio logging_steps deepspeed "
        "dataset_dir template report_to model_name_or_path output_dir learning_rate",
    ),
)

_ARGUMENT = re.compile(r"(?<![\w-])--([a-z][a-z0-9_-]{1,60})")
_MEGATRON_ARGUMENTS = frozenset(
    {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "micro_batch_size",
        "global_batch_size",
        "seq_length",
        "max_position_embeddings",
        "train_iters",
    }
)
_MINDSPEED = re.compile(r"mindspeed|ascend-toolkit|\bHCCL_", re.IGNORECASE)


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
    fits = (
        one for one in _TOOLKITS if one.telling & keys and len((one.telling | one.usual) & keys) >= _ENOUGH
    )
    toolkit = next(fits, None)
    if toolkit is None:
        return
    found = [*sorted(toolkit.telling & keys), *sorted(toolkit.usual & keys)]
    raise ConfigError(
        f"this is {toolkit.name} ({', '.join(found[:4])}), not one of this program.",
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
    name = "MindSpeed" if _MINDSPEED.search(text) else "Megatron-LM"
    raise ConfigError(
        f"this holds command-line arguments of {name}, and is not a configuration of this program.",
        place=place,
        hint="It runs as it is: python projects/megatron/pretrain_gpt.py ARGUMENTS. To have it as a "
        "configuration: ppfleetx translate --to OURS.yaml -- ARGUMENTS (docs/dialects/megatron.md)."
        + _translated(given),
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
