"""Refuse configurations of other toolkits, and suggest our keys for theirs.

The known toolkits are Megatron-LM, NeMo, DeepSpeed, Transformers, PaddleNLP, MindFormers and nanoGPT. Nothing
is translated here; ``ppfleetx translate`` does that.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.reading.tree import Node

_ENOUGH = 2  # keys of our own that other toolkits also use
_MAX_SHOWN = 12
_ADVICE = (
    "ppfleetx translate FILE --to OURS.yaml rewrites files of Megatron-LM, MindSpeed, MindFormers and "
    "PaddleFormers (docs/other_toolkits.md); ppfleetx convert --from hf makes a checkpoint and its "
    "configuration of Hugging Face's."
)


def refuse_foreign(tree: Node, sections: frozenset[str]) -> None:
    """Raise ConfigError if ``tree`` has keys of other toolkits and none of our sections."""
    if not sections.isdisjoint(tree.value):
        return
    known = {key: ours for key in _all_keys(tree) if (ours := our_key(key)) is not None}
    if len(known) < _ENOUGH:
        return
    shown = [f"\n  {key} is {ours}" for key, ours in list(known.items())[:_MAX_SHOWN]]
    raise ConfigError(
        "this is another toolkit's configuration: it has no section of this program, such as Model.",
        place=tree.place,
        hint=f"{_ADVICE} Here{''.join(shown)}",
    )


def _all_keys(tree: Node) -> Iterator[str]:
    for key, node in tree.value.items():
        yield key
        if isinstance(node.value, dict):
            yield from _all_keys(node)


_NAMES = {
    "Global.seed": "random_seed data_seed",
    "Global.global_batch_size": "train_batch_size total_batch_size",
    "Global.local_batch_size": "batch_size per_replica_batch_size",
    "Global.micro_batch_size": "per_device_train_batch_size train_micro_batch_size_per_gpu micro_batch "
    "device_batch_size",
    "Engine.max_steps": "train_iters max_iters train_steps num_steps total_steps max_train_steps "
    "num_training_steps",
    "Engine.num_train_epochs": "epochs num_epochs max_epochs train_epochs",
    "Engine.accumulate_steps": "gradient_accumulation_steps grad_accum_steps accumulate_grad_batches "
    "accumulation_steps micro_batch_num num_micro_batches",
    "Engine.eval_freq": "eval_interval eval_steps evaluation_interval val_check_interval eval_every",
    "Engine.logging_freq": "log_interval logging_steps log_every_n_steps steps_per_print per_print_times",
    "Engine.mix_precision.enable": "fp16 bf16 use_amp amp mixed_precision",
    "Engine.mix_precision.dtype": "precision compute_dtype params_dtype torch_dtype",
    "Engine.mix_precision.level": "fp16_opt_level amp_level opt_level",
    "Engine.mix_precision.scale_loss": "loss_scale initial_loss_scale initial_scale_power loss_scale_value",
    "Engine.mix_precision.incr_every_n_steps": "loss_scale_window scale_window",
    "Engine.mix_precision.main_grad_fp32": "accumulate_allreduce_grads_in_fp32 amp_master_grad "
    "grad_reduce_in_fp32",
    "Engine.save_load.save_steps": "save_interval save_checkpoint_steps save_every checkpoint_interval",
    "Engine.save_load.output_dir": "save save_dir out_dir output_directory default_root_dir",
    "Engine.save_load.ckpt_dir": "load load_dir load_checkpoint resume_from_checkpoint checkpoint_dir",
    "Engine.save_load.init_from": "pretrained_checkpoint model_name_or_path pretrained_model_path",
    "Engine.save_load.resume": "auto_resume resume_training resume_if_exists",
    "Engine.save_load.keep_max": "save_total_limit keep_checkpoint_max max_checkpoints",
    "Model.num_layers": "n_layer n_layers num_hidden_layers num_decoder_layers",
    "Model.hidden_size": "n_embd d_model hidden_dim embed_dim embedding_size",
    "Model.num_attention_heads": "n_head n_heads num_heads attention_heads",
    "Model.num_query_groups": "n_kv_heads n_kv_head num_key_value_heads num_kv_heads",
    "Model.head_dim": "kv_channels head_size attention_head_size",
    "Model.ffn_hidden_size": "intermediate_size n_inner ffn_dim feedforward_dim ffn_size",
    "Model.hidden_act": "activation activation_function hidden_activation swiglu activation_func",
    "Model.hidden_dropout_prob": "hidden_dropout resid_pdrop embd_pdrop dropout_rate residual_dropout "
    "hidden_dropout_rate",
    "Model.attention_probs_dropout_prob": "attention_dropout attn_pdrop attention_dropout_rate attn_dropout",
    "Model.max_position_embeddings": "n_positions n_ctx block_size max_positions max_position",
    "Model.position_embedding_type": "use_rope use_rotary_position_embeddings rope",
    "Model.rotary_base": "rope_theta rope_base rotary_emb_base",
    "Model.rope_scaling": "rope_parameters use_rope_scaling rotary_scaling",
    "Model.rope_scaling.type": "rope_type rope_scaling_type",
    "Model.rope_scaling.factor": "rope_scaling_factor rotary_seq_len_interpolation_factor",
    "Model.rotary_percent": "rotary_pct partial_rotary_factor rope_percent rope_pct",
    "Model.attention_window": "sliding_window sliding_window_size window_size local_attention_window",
    "Model.qk_layernorm": "qk_norm use_qk_norm qk_layer_norm query_key_norm",
    "Model.parallel_residual": "use_parallel_residual gpt_j_residual parallel_attn parallel_block",
    "Model.normalization": "norm_type norm layer_norm_type use_rms_norm",
    "Model.norm_epsilon": "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps",
    "Model.tie_word_embeddings": "untie_embeddings_and_output_weights share_embeddings_and_output_weights "
    "tie_embeddings",
    "Model.add_bias_linear": "disable_bias_linear use_bias",
    "Model.initializer_range": "init_method_std init_std initializer_std",
    "Model.vocab_size_divisible_unit": "make_vocab_size_divisible_by pad_vocab_size_to_multiple_of",
    "Model.use_flash_attn": "use_flash_attention flash_attention flash_attn",
    "Model.use_recompute": "recompute gradient_checkpointing use_gradient_checkpointing "
    "activation_checkpointing checkpoint_activations recompute_activations",
    "Model.sequence_parallel": "use_seq_parallel enable_sequence_parallel use_sequence_parallel",
    "Model.virtual_pp_degree": "virtual_pipeline_model_parallel_size pp_interleave_num virtual_pp "
    "virtual_pp_size",
    "Model.lora.rank": "lora_rank lora_r",
    "Model.lora.alpha": "lora_alpha",
    "Model.lora.targets": "lora_target_modules target_modules",
    "Model.moe.num_experts": "num_local_experts n_routed_experts moe_num_experts expert_num",
    "Model.moe.top_k": "num_experts_per_tok moe_router_topk moe_top_k num_experts_chosen",
    "Model.moe.expert_ffn_size": "moe_intermediate_size moe_ffn_hidden_size",
    "Model.moe.shared_experts": "n_shared_experts shared_expert_intermediate_size",
    "Model.moe.aux_loss.weight": "router_aux_loss_coef moe_aux_loss_coeff aux_loss_factor",
    "Model.moe.router.scale": "routed_scaling_factor moe_router_topk_scaling_factor",
    "Data.Train.dataset.input_dir": "data_path data_dir train_data_path dataset_dir data_prefix train_file",
    "Data.Train.dataset.max_seq_len": "seq_length seq_len max_seq_length sequence_length max_sequence_length "
    "encoder_seq_length model_max_length",
    "Data.Train.loader.num_workers": "dataloader_num_workers num_parallel_workers",
    "Data.tokenizer.dir": "tokenizer_name_or_path tokenizer_path tokenizer_model tokenizer_name "
    "tokenizer_type",
    "Data.tokenizer.merges_file": "merge_file merges",
    "Data.tokenizer.vocab_file": "vocab vocab_path",
    "Distributed.dp_degree": "data_parallel data_parallel_size data_parallel_degree dp_size dp",
    "Distributed.mp_degree": "tensor_parallel_degree tensor_model_parallel_size tensor_parallel_size "
    "tensor_parallel tp_degree tp_size tp model_parallel model_parallel_size mp_size mp",
    "Distributed.pp_degree": "pipeline_parallel_degree pipeline_model_parallel_size pipeline_parallel_size "
    "pipeline_parallel pipeline_stage num_stages pp_size pp",
    "Distributed.sep_degree": "context_parallel context_parallel_size context_parallel_degree "
    "sep_parallel_degree sequence_parallel_size ulysses_degree cp_size cp",
    "Distributed.ep_degree": "expert_parallel expert_parallel_degree expert_model_parallel_size "
    "expert_parallel_size expert_model_parallel_degree ep_size ep",
    "Distributed.expert_mp_degree": "expert_tensor_parallel_size expert_tensor_parallel_degree "
    "expert_tensor_model_parallel_size etp_size etp",
    "Distributed.sharding.sharding_degree": "sharding_parallel_degree sharding_parallel_size "
    "optimizer_weight_shard_size",
    "Distributed.sharding.sharding_stage": "zero_stage zero_optimization sharding_level",
    "Distributed.sharding.sharding_offload": "cpu_offload offload_optimizer optimizer_offload offload",
    "Optimizer.lr.max_lr": "lr learning_rate base_lr peak_lr",
    "Optimizer.lr.min_lr": "min_learning_rate lr_end eta_min final_lr",
    "Optimizer.lr.decay_steps": "lr_decay_iters lr_decay_steps decay_iters",
    "Optimizer.lr.warmup_steps": "lr_warmup_iters warmup_iters num_warmup_steps lr_warmup_steps",
    "Optimizer.lr.warmup_rate": "warmup_ratio lr_warmup_fraction warmup_fraction",
    "Optimizer.lr.decay_style": "lr_decay_style lr_scheduler_type lr_scheduler lr_schedule_type",
    "Optimizer.beta1": "adam_beta1",
    "Optimizer.beta2": "adam_beta2",
    "Optimizer.epsilon": "adam_eps adam_epsilon eps",
    "Optimizer.weight_decay": "wd weight_decay_rate",
    "Optimizer.grad_clip.clip_norm": "clip_grad max_grad_norm gradient_clipping gradient_clip_val "
    "grad_norm_clip clip_grad_norm",
    "Generation.max_dec_len": "max_new_tokens max_generate_length out_seq_length",
    "Generation.min_dec_len": "min_new_tokens",
    "Generation.decode_strategy": "do_sample",
    "Generation.diversity_rate": "diversity_penalty",
}

OURS = {name: key for key, names in _NAMES.items() for name in names.split()}
"""Our key for each name of another toolkit."""


def our_key(name: str) -> str | None:
    """Our key for another toolkit's ``name``, also in the form ``--Tensor-Parallel-Size``; None if
    unknown.
    """
    return OURS.get(name.strip("-").replace("-", "_").lower())
