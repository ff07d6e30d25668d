"""What the arguments of PaddleNLP's and PaddleFormers' pretraining mean here."""

from __future__ import annotations

from typing import Any

from ppfleetx.dialects.keys import Key, KeyTable, fixed, joint, mapped, refused, unused
from ppfleetx.dialects.translate import flag, integer

_OFF: tuple[Any, ...] = (False, None, 0)
_SPEED = "speed or memory alone: no number changes"
_ONE = (-1, 0, 1, None)


def _many(make: Any, names: str, *rest: Any) -> list[Key]:
    return [make(name, *rest) for name in names.split()]


def _inverted(value: Any) -> bool:
    return not flag(value)


def _positive(value: Any) -> int | None:
    """A number, of which -1 and 0 say that there is none."""
    return None if value in (-1, 0) and not isinstance(value, bool) else integer(value)


def _where_true(value: Any) -> bool | None:
    return True if flag(value) else None


MODEL = (
    joint(
        "model_name_or_path",
        "Model",
        "a directory with config.json (GPT-2 or Llama), or with our config.yaml",
    ),
    joint("continue_training", "Engine.save_load.init_from", "true: from the weights in model_name_or_path"),
    mapped("use_flash_attention", "Model.use_flash_attn", lambda value: bool(value)),
    mapped("hidden_dropout_prob", "Model.hidden_dropout_prob"),
    mapped("attention_probs_dropout_prob", "Model.attention_probs_dropout_prob"),
    joint("recompute", "Model.use_recompute", ""),
    joint(
        "recompute_granularity",
        "Model.recompute_granularity",
        "full, full_attn, core_attn; selective: core_attn",
    ),
    joint("recompute_method", "Model.recompute_layers", "uniform: all; block: the first of each stage"),
    joint("recompute_num_layers", "Model.recompute_layers", "of block"),
    mapped("no_recompute_layers", "Model.no_recompute_layers"),
    joint("virtual_pp_degree", "Model.virtual_pp_degree", ""),
    joint("virtual_pipeline_model_parallel_size", "Model.virtual_pp_degree", ""),
    joint("sequence_parallel", "Model.sequence_parallel", "where the tensor-parallel size is above 1"),
    *_many(
        fixed,
        "recompute_modules recompute_mtp_granularity recompute_mtp_method recompute_mtp_modules",
        "recompute_granularity says it",
        (None,),
    ),
)

PARALLEL = (
    joint("tensor_model_parallel_size", "Distributed.mp_degree", "-1: 1"),
    joint("tensor_parallel_degree", "Distributed.mp_degree", "an older name"),
    joint("pipeline_model_parallel_size", "Distributed.pp_degree", "-1: 1"),
    joint("pipeline_parallel_degree", "Distributed.pp_degree", "an older name"),
    joint("sep_parallel_size", "Distributed.sep_degree", "-1: 1"),
    joint("sep_parallel_degree", "Distributed.sep_degree", "an older name"),
    joint(
        "sharding",
        "Distributed.sharding.sharding_stage Distributed.sharding.sharding_offload",
        "stage1, stage2 or stage3, and offload",
    ),
    joint("sharding_parallel_size", "Distributed.sharding.sharding_degree", "-1: all data-parallel ranks"),
    joint("sharding_parallel_degree", "Distributed.sharding.sharding_degree", "an older name"),
    joint("sharding_degree", "Distributed.sharding.sharding_degree", "an older name"),
    joint("data_parallel_size", "Distributed.dp_degree", "what the others leave of the processes"),
    joint("data_parallel_degree", "Distributed.dp_degree", "an older name"),
    *_many(
        fixed,
        "context_parallel_size context_parallel_degree",
        "rings are not built; sep_parallel_size splits sequences",
        _ONE,
    ),
    *_many(
        fixed,
        "expert_model_parallel_size expert_parallel_degree expert_tensor_model_parallel_size "
        "expert_tensor_parallel_degree",
        "mixtures of experts are not built",
        _ONE,
    ),
    *_many(fixed, "use_expert_parallel using_sonic_moe", "mixtures of experts are not built", _OFF),
    *_many(
        fixed,
        "enable_auto_parallel to_static use_intermediate_api auto_parallel_resume_form_hybrid_parallel",
        "there is one mode: dynamic, with the plan that is said",
        _OFF,
    ),
    *_many(
        fixed,
        "tensorwise_offload_optimizer",
        "sharding: 'stage2 offload' keeps the states in host memory",
        _OFF,
    ),
)

TRAINING = (
    joint(
        "per_device_train_batch_size", "Global.micro_batch_size", "samples of a forward pass; not given: 8"
    ),
    joint("gradient_accumulation_steps", "Engine.accumulate_steps", "forward passes of a step; not given: 1"),
    joint("global_batch_size", "Global.global_batch_size", "must agree with the two above"),
    joint("max_steps", "Engine.max_steps", "must be given: a run is as long as its steps"),
    fixed("num_train_epochs", "max_steps says how long a run is"),
    joint("seed", "Global.seed", "not given: 42"),
    joint("logging_steps", "Engine.logging_freq", "not given: 5"),
    joint("do_eval", "Engine.eval_freq", "with eval_steps"),
    joint("eval_steps", "Engine.eval_freq", "where do_eval or evaluation_strategy asks for it"),
    joint("evaluation_strategy", "Engine.eval_freq", "steps or no"),
    joint("eval_iters", "Engine.eval_iters", "not given: 10"),
    mapped("test_iters", "Engine.test_iters", _positive),
    joint("max_evaluate_steps", "Engine.eval_iters", "an upper bound there, the number here"),
    fixed("per_device_eval_batch_size", "an evaluation reads the batches of training; its loss is per token"),
    mapped("disable_tqdm", "Engine.progress_bar", lambda value: False if flag(value) else None, "true: none"),
    joint(
        "device", "Global.device", "gpu: auto; npu and xpu: these, or auto where Paddle has none; cpu: cpu"
    ),
    joint("no_cuda", "Global.device", "true: cpu"),
    joint("bf16", "Engine.mix_precision.enable Engine.mix_precision.dtype", "bfloat16"),
    joint("fp16", "Engine.mix_precision.enable Engine.mix_precision.dtype", "float16"),
    joint("fp16_opt_level", "Engine.mix_precision.level", "O1 or O2, of both types; O0: float32"),
    mapped("amp_master_grad", "Engine.mix_precision.main_grad_fp32", flag),
    mapped("amp_custom_black_list", "Engine.mix_precision.custom_black_list"),
    mapped("amp_custom_white_list", "Engine.mix_precision.custom_white_list"),
    mapped("scale_loss", "Engine.mix_precision.scale_loss"),
    *_many(fixed, "bf16_full_eval fp16_full_eval", "an evaluation computes as training does", _OFF),
    fixed("use_lowprecision_moment", "moments are float32", _OFF),
    fixed("freeze_training", "a run that changes nothing is tools/eval.py", _OFF),
    mapped("profile", "Profiler.enable"),
    joint("profile_step_start", "Profiler.scheduler", "first step"),
    joint("profile_step_end", "Profiler.scheduler", "the step before which it ends"),
    fixed("skip_profile_timer", "the log line has the times"),
)

OPTIMIZER = (
    fixed("optim", "AdamW; others are not built", ("adamw",)),
    joint("learning_rate", "Optimizer.lr.max_lr", "not given: 1e-5"),
    joint("min_learning_rate", "Optimizer.lr.min_lr", ""),
    joint("min_lr", "Optimizer.lr.min_lr", ""),
    joint("lr_scheduler_type", "Optimizer.lr.decay_style", "linear, cosine, constant, constant_with_warmup"),
    joint("decay_steps", "Optimizer.lr.decay_steps", "not given: max_steps"),
    joint("warmup_steps", "Optimizer.lr.warmup_steps", "above 0: instead of warmup_ratio"),
    joint("warmup_ratio", "Optimizer.lr.warmup_steps", "of max_steps, rounded up"),
    fixed("num_cycles", "a cosine schedule is half a wave", (0.5,)),
    fixed("lr_end", "it belongs to the polynomial schedule, which is not built"),
    fixed("power", "it belongs to the polynomial schedule, which is not built"),
    joint("weight_decay", "Optimizer.weight_decay", "not given: 0.1"),
    mapped("adam_beta1", "Optimizer.beta1"),
    joint("adam_beta2", "Optimizer.beta2", "not given: 0.95"),
    mapped("adam_epsilon", "Optimizer.epsilon"),
    mapped("max_grad_norm", "Optimizer.grad_clip.clip_norm"),
    *_many(
        unused,
        "muon_exclude_patterns muon_qkv_update_mode muon_ffn_split muon_extra_scale_factor "
        "muon_momentum muon_version muon_ns_steps muon_ns_coeff_type muon_ns_coeffs muon_use_symmetric_gemm",
        "of an optimizer that is not built; optim says which holds",
    ),
)

DATA = (
    joint(
        "input_dir",
        "Data.Train.dataset.input_dir Data.Train.dataset.weights",
        "a prefix, a directory, or weight prefix weight prefix ...",
    ),
    joint("split", "Data.Train.dataset.split Data.Eval.dataset.split", "not given: 949,50,1"),
    joint("max_seq_length", "Data.Train.dataset.max_seq_len", "not given: 1024"),
    joint("max_seq_len", "Data.Train.dataset.max_seq_len", ""),
    joint("data_cache", "Data.Train.dataset.cache_dir Data.Eval.dataset.cache_dir", "of all data sets"),
    fixed("data_impl", "the format of a corpus is seen in its files", ("mmap", "lazy", None)),
    joint(
        "tokenizer_name_or_path", "Data.tokenizer.dir", "a directory with tokenizer files; a name is refused"
    ),
    joint("dataloader_num_workers", "Data.Train.loader.num_workers", ""),
    mapped("dataloader_drop_last", "Data.Train.sampler.drop_last"),
    fixed("dataloader_shuffle", "the index maps hold the order", (True,)),
    fixed("skip_data_intervals", "no step can be left out", (None,)),
    joint("eod_mask_loss", "Data.Train.dataset.eod_mask_loss", ""),
    *_many(
        fixed,
        "pad_token_id past_index label_names remove_unused_columns variable_seq_lengths",
        "samples are token ids of one length",
    ),
)

CHECKPOINTS = (
    mapped("output_dir", "Engine.save_load.output_dir"),
    mapped("overwrite_output_dir", "Engine.save_load.overwrite", _where_true),
    joint("save_steps", "Engine.save_load.save_steps", "not given: 500"),
    joint("save_strategy", "Engine.save_load.save_steps", "steps, or no: only at the end"),
    mapped("save_total_limit", "Engine.save_load.keep_max"),
    joint(
        "resume_from_checkpoint",
        "Engine.save_load.ckpt_dir Engine.save_load.resume",
        "a path; true: the newest",
    ),
    joint("load_best_model_at_end", "Engine.save_load.keep_best", "true: loss; the file `best` names it"),
    fixed("metric_for_best_model", "the loss of an evaluation decides", ("loss", "eval_loss", None)),
    fixed("greater_is_better", "of losses the smaller is better", (False, None)),
    mapped("ignore_data_skip", "Engine.save_load.reset_data", _where_true),
    mapped("ignore_load_lr_and_optim", "Engine.save_load.load_optim", _inverted, "inverted"),
    mapped("use_async_save", "Engine.save_load.async_save"),
    fixed("ignore_save_lr_and_optim", "a checkpoint holds the optimizer's state", _OFF),
    fixed("save_rng_states", "a checkpoint holds the generators' states", (True,)),
    fixed("ckpt_quant_stage", "checkpoints are exact", ("O0",)),
    refused(
        "resume_from_huggingface_ckpt",
        "convert it once: ppfleetx convert --from hf, then model_name_or_path with continue_training: true",
    ),
    *_many(
        fixed,
        "unified_checkpoint unified_checkpoint_config save_checkpoint_format load_checkpoint_format "
        "save_sharded_model load_sharded_model load_sharded_model_remap_parameter_name save_safetensors "
        "save_tokenizer save_last_step force_reshard_pp save_on_each_node aoa_config load_via_cpu "
        "save_sharding_stage1_model_include_freeze_params replicate_saved_into_local load_from_hf "
        "convert_from_hf flex_ckpt_comm_method reshard_bucketed_broadcast_max_chunk_gb "
        "reshard_master_weight_device_gather ordered_save_group_size use_flex_async_save "
        "enable_zero_cost_checkpoint zcc_workers_num zcc_pipeline_hooks_capacity_usage "
        "flash_device_save_steps save_hf_memory_growth_threshold",
        "checkpoints have one form, which every plan reads (docs/checkpoint_format.md)",
    ),
    *_many(
        fixed,
        "save_hf_steps save_hf_total_limit",
        "convert a checkpoint with ppfleetx convert --to hf",
        (-1, None),
    ),
    *_many(fixed, "zcc_save_ema_coef zcc_ema_loss_threshold", "averages of weights are not built", (None, 0)),
    *_many(
        unused,
        "zcc_ema_interval online_merge_ema sharded_model_from_ema",
        "averages of weights are not built",
    ),
)

OTHERS = (
    *_many(fixed, "do_train", "the script trains", (True, 1)),
    *_many(unused, "do_predict do_export", "evaluate and export with ppfleetx eval and ppfleetx export"),
    *_many(
        unused,
        "report_to logging_dir logging_strategy logging_first_step log_on_each_node run_name "
        "metrics_output_path skip_memory_metrics count_trained_tokens wandb_api_key wandb_http_proxy "
        "log_level timer minimum_eval_times prediction_loss_only eval_accumulation_steps output_signal_dir",
        "metrics.jsonl, VisualDL and the log line hold what a run measures",
    ),
    *_many(
        unused,
        "local_rank distributed_dataloader pdc_download_ckpt pdc_download_timeout "
        "nccl_comm_group_config pre_alloc_memory ddp_find_unused_parameters lazy_data_processing "
        "flatten_param_grads model_type autotuner_benchmark tokenizer_type",
        "another program's machinery",
    ),
    *_many(
        fixed,
        "data_parallel_config tensor_parallel_config pipeline_parallel_config sharding_parallel_config "
        "sequence_parallel_config hybrid_parallel_topo_order sharding_parallel_mesh_dimension "
        "sharding_comm_buffer_size_MB sharding_comm_group_call_opt sharding_machine_balanced_2d_partition "
        "sharding_offload_opt_buffersize_GB fuse_sequence_parallel_allreduce split_inputs_sequence_dim "
        "cp_balance_mode cp_comm_type prefetch_factor release_grads optim_shard_num split_norm_comm "
        "reorder_pipeline_priority dp_comm_overlap pp_sharding_comm_overlap tp_async_allreduce "
        "sp_async_reduce_scatter overlap_p2p_comm batch_p2p_comm dp_allreduce_avg_in_gradinent_scale "
        "sp_allreduce_avg_in_gradinent_scale gradient_sync_after_accumulate mp_async_allreduce "
        "mp_skip_c_identity mp_fused_linear_param_grad_add pp_delay_scale_loss pp_sync_param tp_sync_param "
        "sync_grad tp_sync_moment pp_sync_moment replace_with_c_embedding "
        "replace_with_parallel_cross_entropy "
        "p2p_cache_shape partial_send_recv pp_release_grads clear_every_step_cache non_batch_p2p_comm "
        "auto_parallel_sync_shared_params best_unbalanced_scheduler offload_queue use_dualpipev "
        "forward_backward_overlap_scheduler send_recv_overlap split_backward stage1_tensor_fusion "
        "tensor_fusion stage1_overlap overlap stage2_overlap stage1_broadcast_overlap "
        "stage1_allgather_overlap stage1_reduce_avg fuse_optimizer_states sd_release_grads split_param "
        "sd_sharding_comm_overlap sd_shardingv1_comm_overlap fa_version fuse_attention_qkv "
        "fuse_attention_ffn use_fused_rope use_fused_rms_norm use_fused_linear use_fused_dropout_add "
        "use_fused_linear_cross_entropy recompute_use_reentrant pp_seg_method deterministic_mode use_cache "
        "offload_fp8_expert_master_weight skip_recompute_ops",
        _SPEED,
    ),
    *_many(fixed, "num_nextn_predict_layers mtp_num_layers", "one next token is predicted", (0, None)),
    *_many(fixed, "train_mtp_only mtp_distillation_loss", "one next token is predicted", _OFF),
    *_many(
        unused,
        "moe_router_bias_update_rate hybrid_parallel_expert_grad_scale dsa_indexer_loss_coeff",
        "of layers that are not built",
    ),
)

CONFIG = "config.json"
_ACT = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu"}
NETWORK = (
    joint(
        f"{CONFIG}.model_type",
        "Model.position_embedding_type Model.normalization Model.hidden_act",
        "gpt2 or llama",
    ),
    mapped(f"{CONFIG}.vocab_size", "Model.vocab_size"),
    mapped(f"{CONFIG}.n_embd", "Model.hidden_size"),
    mapped(f"{CONFIG}.hidden_size", "Model.hidden_size"),
    mapped(f"{CONFIG}.n_layer", "Model.num_layers"),
    mapped(f"{CONFIG}.num_hidden_layers", "Model.num_layers"),
    mapped(f"{CONFIG}.n_head", "Model.num_attention_heads"),
    mapped(f"{CONFIG}.num_attention_heads", "Model.num_attention_heads"),
    mapped(f"{CONFIG}.num_key_value_heads", "Model.num_query_groups"),
    mapped(f"{CONFIG}.head_dim", "Model.head_dim"),
    mapped(f"{CONFIG}.n_inner", "Model.ffn_hidden_size"),
    mapped(f"{CONFIG}.intermediate_size", "Model.ffn_hidden_size"),
    mapped(f"{CONFIG}.n_positions", "Model.max_position_embeddings"),
    mapped(f"{CONFIG}.max_position_embeddings", "Model.max_position_embeddings"),
    joint(f"{CONFIG}.activation_function", "Model.hidden_act", ", ".join(_ACT)),
    fixed(f"{CONFIG}.hidden_act", "of a Llama: SwiGLU", ("silu",)),
    mapped(f"{CONFIG}.layer_norm_epsilon", "Model.norm_epsilon"),
    mapped(f"{CONFIG}.rms_norm_eps", "Model.norm_epsilon"),
    mapped(f"{CONFIG}.initializer_range", "Model.initializer_range"),
    joint(f"{CONFIG}.resid_pdrop", "Model.hidden_dropout_prob", ""),
    joint(f"{CONFIG}.embd_pdrop", "Model.embedding_dropout_prob", ""),
    joint(f"{CONFIG}.attn_pdrop", "Model.attention_probs_dropout_prob", ""),
    joint(f"{CONFIG}.attention_dropout", "Model.attention_probs_dropout_prob", ""),
    mapped(f"{CONFIG}.rope_theta", "Model.rotary_base"),
    joint(
        f"{CONFIG}.tie_word_embeddings", "Model.tie_word_embeddings", "of a Llama false, if it is not there"
    ),
    mapped(f"{CONFIG}.attention_bias", "Model.add_qkv_bias Model.add_out_proj_bias"),
    mapped(f"{CONFIG}.mlp_bias", "Model.add_mlp_bias"),
    fixed(
        f"{CONFIG}.rope_scaling", "convert the checkpoint (ppfleetx convert); its config.yaml has it", (None,)
    ),
    *_many(
        unused,
        " ".join(
            f"{CONFIG}.{name}"
            for name in [
                "architectures",
                "torch_dtype",
                "dtype",
                "transformers_version",
                "paddleformers_version",
                "paddlenlp_version",
                "use_cache",
                "bos_token_id",
                "eos_token_id",
                "pad_token_id",
                "n_ctx",
                "summary_activation",
                "summary_first_dropout",
                "summary_proj_to_labels",
                "summary_type",
                "summary_use_proj",
                "task_specific_params",
                "pretraining_tp",
                "tensor_parallel_output",
                "seq_length",
                "return_dict",
            ]
        ),
        "of other programs",
    ),
    unused(f"{CONFIG}.summary_first_dropout.*", "of other programs"),
    unused(f"{CONFIG}.task_specific_params.**", "of other programs"),
    joint("config.yaml.Model.**", "Model", "of a converted checkpoint: as it is"),
)
ACTIVATIONS = _ACT

TABLES = {
    "model": MODEL,
    "parallelism": PARALLEL,
    "training": TRAINING,
    "optimizer": OPTIMIZER,
    "data": DATA,
    "checkpoints": CHECKPOINTS,
    "others": OTHERS,
    "config.json": NETWORK,
}
TABLE = KeyTable([key for group in TABLES.values() for key in group])
