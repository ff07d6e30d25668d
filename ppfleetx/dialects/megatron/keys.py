"""What the arguments of Megatron-LM, Megatron-DeepSpeed and MindSpeed's ``pretrain_gpt.py`` mean here.

The rules that read several of them together are in :mod:`ppfleetx.dialects.megatron.network_rules`.
"""

from __future__ import annotations

import re
from typing import Any

from ppfleetx.dialects.given import normal_name
from ppfleetx.dialects.keys import Key, KeyTable, fixed, joint, mapped, refused, unused
from ppfleetx.dialects.translate import choice, flag, integer

_SPEED = "speed alone: no number changes"
_WHOLE_GAINS = "gains are kept whole, not less 1; they do not decay, so training is the same"
_ALWAYS = "always so here"
_OFF: tuple[Any, ...] = (False,)


def _many(names: str, says: str) -> list[Key]:
    return [unused(name, says) for name in names.split()]


def _same_for_all(names: str, says: str) -> list[Key]:
    return [fixed(name, says) for name in names.split()]


def _not_built(names: str, says: str) -> list[Key]:
    return [refused(name, says) for name in names.split()]


def _inverted(value: Any) -> bool:
    return not flag(value)


def _count(value: Any) -> int:
    return integer(value, least=0)


_WINDOW = re.compile(r"\s*[(\[]?\s*(-1|\d{1,9})\s*,\s*(-1|\d{1,9})\s*[)\]]?\s*", re.ASCII)


def _window(value: Any) -> dict[str, Any]:
    """``[left, right]`` of a causal model: right has no meaning, a left of -1 is no window."""
    found = _WINDOW.fullmatch(str(value))
    if found is None:
        raise ValueError("must be two integers, left and right, -1 for no limit, e.g. (128,0)")
    left = int(found[1])
    if left == 0:
        raise ValueError("a window of 0 lets each token see itself alone")
    return {} if left < 0 else {"Model.attention_window": left}


MODEL: tuple[Key, ...] = (
    *_not_built("perform_rl_step grpo_group_size", "reinforcement learning is not built"),
    *_not_built(
        "num_tokens_to_generate prompts prompt_file inference_max_seq_length "
        "inference_dynamic_batching_buffer_size_gb",
        "an option of a program that writes text: ppfleetx generate does it here",
    ),
    fixed("num_experts", "mixtures of experts are not built", (None, 0, 1)),
    *_not_built(
        "hybrid_layer_pattern hybrid_override_pattern is_hybrid_model mamba_num_heads mamba_head_dim "
        "mamba_state_dim linear_attention_freq experimental_attention_variant model_provider "
        "encoder_num_layers decoder_num_layers bert_no_binary_head img_h",
        "another network than GPT",
    ),
    refused("spec", "layers of a program's own; here a plugin declares them (docs/extending.md)"),
    refused("multi_latent_attention", "latent attention is not built"),
    refused("mtp_num_layers", "the prediction of several tokens is not built"),
    refused("use_mup", "initial values and learning rates by width are not built"),
    refused("attention_output_gate", "a gate on attention's output is not built"),
    *_not_built("fp8_format fp4_format", "products in 8 bits or fewer are not built; train in bf16"),
    *_not_built(
        "export_kd_teacher_load",
        "distillation is configured by Compress.Distill, with a model of this program",
    ),
    mapped("num_layers", "Model.num_layers"),
    mapped("hidden_size", "Model.hidden_size"),
    mapped("ffn_hidden_size", "Model.ffn_hidden_size"),
    mapped("num_attention_heads", "Model.num_attention_heads"),
    mapped("kv_channels", "Model.head_dim"),
    joint("group_query_attention", "Model.num_query_groups", "switches num_query_groups on"),
    joint("num_query_groups", "Model.num_query_groups", "with group_query_attention; 1 if it is not given"),
    mapped("max_position_embeddings", "Model.max_position_embeddings"),
    joint(
        "position_embedding_type",
        "Model.position_embedding_type",
        "learned_absolute, rope or none; others are refused",
    ),
    joint("use_rotary_position_embeddings", "Model.position_embedding_type", "rope"),
    joint("no_position_embedding", "Model.position_embedding_type", "none, unless rope is asked for"),
    mapped("rotary_base", "Model.rotary_base"),
    mapped("rotary_percent", "Model.rotary_percent"),
    joint("rotary_seq_len_interpolation_factor", "Model.rope_scaling", "{type: linear, factor: it}"),
    joint("use_rope_scaling", "Model.rope_scaling", "{type: llama3} with Megatron's constants"),
    joint("rope_scaling_factor", "Model.rope_scaling", "with use_rope_scaling; 8 if it is not given"),
    fixed("rotary_interleaved", "halves of a head are paired, not neighbours", _OFF),
    mapped("normalization", "Model.normalization", choice({"LayerNorm": "LayerNorm", "RMSNorm": "RMSNorm"})),
    mapped("norm_epsilon", "Model.norm_epsilon"),
    mapped("layernorm_epsilon", "Model.norm_epsilon"),
    fixed("apply_layernorm_1p", _WHOLE_GAINS),
    fixed("layernorm_zero_centered_gamma", _WHOLE_GAINS),
    mapped("qk_layernorm", "Model.qk_layernorm"),
    fixed("apply_residual_connection_post_layernorm", "the residual is taken before the norm", _OFF),
    joint("swiglu", "Model.hidden_act", "swiglu"),
    joint("squared_relu", "Model.hidden_act", "relu2"),
    joint("openai_gelu", "Model.hidden_act", "gelu, the tanh form"),
    joint(
        "no_bias_gelu_fusion", "Model.hidden_act", "gelu_exact: without that fusion Megatron's GeLU is exact"
    ),
    joint("hidden_act", "Model.hidden_act", "gelu (tanh), gelu_exact, relu, relu2, squared_relu or swiglu"),
    mapped("untie_embeddings_and_output_weights", "Model.tie_word_embeddings", _inverted, "inverted"),
    mapped("add_bias_linear", "Model.add_bias_linear"),
    mapped("disable_bias_linear", "Model.add_bias_linear", _inverted, "inverted"),
    mapped(
        "add_qkv_bias", "Model.add_qkv_bias", lambda value: True if flag(value) else None, "where it is on"
    ),
    mapped("add_dense_bias", "Model.add_out_proj_bias", says="bias of the attention output projection"),
    mapped("use_sandwich_norm", "Model.sandwich_norm"),
    mapped("attn_post_norm_scale", "Model.attn_post_norm_scale"),
    mapped("ffn_post_norm_scale", "Model.ffn_post_norm_scale"),
    joint("pre_tockens", "Model.attention_window", "where it is shorter than the sequence"),
    joint("next_tockens", "Model.attention_window", "at least 0: a causal model sees nothing ahead"),
    mapped("window_size", "Model.attention_window", _window, "its left part"),
    fixed("shape_order", "layout of a kernel's operands"),
    mapped("init_method_std", "Model.initializer_range"),
    mapped("embedding_init_method_std", "Model.embedding_initializer_range"),
    fixed("init_method_xavier_uniform", "initial weights are normal", _OFF),
    mapped("attention_dropout", "Model.attention_probs_dropout_prob"),
    mapped("hidden_dropout", "Model.hidden_dropout_prob"),
    joint("attention_softmax_in_fp32", "Model.softmax_in_fp32", "not given: on anyway"),
    mapped("apply_query_key_layer_scaling", "Model.scale_qk_by_layer_num"),
    mapped("no_query_key_layer_scaling", "Model.scale_qk_by_layer_num", _inverted, "inverted"),
    mapped("use_flash_attn", "Model.use_flash_attn"),
    mapped(
        "attention_backend",
        "Model.attention_kernel",
        choice(
            {"auto": "auto", "flash": "flash", "fused": "auto", "unfused": "reference", "local": "reference"}
        ),
        "auto, flash or reference",
    ),
    fixed("transformer_impl", "there is one implementation"),
    fixed("fp16_lm_cross_entropy", "the loss is computed in float32 in every precision", _OFF),
    joint(
        "fp32_residual_connection", (), "on only in a run in float32: in 16 bits the residual is 16-bit too"
    ),
    joint("vocab_size", "Model.vocab_size", "true size; not given: from vocab_file"),
    joint("padded_vocab_size", "Model.vocab_size", "taken as it is, with Model.vocab_size_divisible_unit 1"),
    joint(
        "make_vocab_size_divisible_by", "Model.vocab_size_divisible_unit", "times the tensor-parallel size"
    ),
)

RECOMPUTE: tuple[Key, ...] = (
    *tuple(
        joint(name, "Model.use_recompute Model.recompute_granularity Model.recompute_layers", says)
        for name, says in (
            ("recompute_activations", "recompute_granularity: selective"),
            ("recompute_granularity", "selective is core_attn, full is full"),
            ("recompute_method", "uniform: all layers; block: the first recompute_num_layers of each stage"),
            (
                "recompute_num_layers",
                "of block; the groups of uniform change memory alone, here each layer is one",
            ),
            ("recompute_modules", "core_attn alone"),
            ("checkpoint_activations", "an older name of recompute_granularity: full"),
            ("checkpoint_num_layers", "an older name of recompute_num_layers with uniform"),
            (
                "deepspeed_activation_checkpointing",
                "who does it makes no difference; checkpoint_activations asks for it",
            ),
            ("recompute", "layers recomputed in full: a list for each stage, or true"),
            ("select_recompute", "true: core_attn of all layers; counts are refused"),
        )
    ),
    fixed("select_comm_recompute", "gathered activations are not kept, whatever it says"),
    fixed("distribute_saved_activations", "where saved activations lie changes memory alone"),
    fixed("partition_activations", "where saved activations lie changes memory alone"),
    fixed("checkpoint_in_cpu", "where saved activations lie changes memory alone"),
    fixed("contigious_checkpointing", "where saved activations lie changes memory alone"),
    fixed("synchronize_each_layer", "for debugging that program"),
    fixed("profile_backward", "for debugging that program"),
)

TRAINING: tuple[Key, ...] = (
    mapped("seed", "Global.seed"),
    mapped("log_interval", "Engine.logging_freq"),
    mapped("train_iters", "Engine.max_steps"),
    joint("train_samples", "Engine.max_steps", "divided by global_batch_size, which must be given"),
    joint("save_interval", "Engine.save_load.save_steps", "not given: only at the end"),
    mapped("eval_interval", "Engine.eval_freq", _count),
    joint("eval_iters", "Engine.eval_iters", "0: no evaluation"),
    mapped("clip_grad", "Optimizer.grad_clip.clip_norm"),
    joint("bf16", "Engine.mix_precision.enable Engine.mix_precision.dtype", "bfloat16"),
    joint("fp16", "Engine.mix_precision.enable Engine.mix_precision.dtype", "float16"),
    joint("params_dtype", "Engine.mix_precision.enable", "float32 alone, or the type that compute_dtype has"),
    joint("compute_dtype", "Engine.mix_precision.dtype", "float32, float16 or bfloat16"),
    fixed("embedding_dtype", "initial values are computed in float64 and kept in float32"),
    joint("loss_scale", "Engine.mix_precision.scale_loss", "a constant scale; 0 or not given: dynamic"),
    joint("initial_loss_scale", "Engine.mix_precision.scale_loss", "not given: 2^32, as there"),
    fixed("min_loss_scale", "the smallest scale is 1", (1, 1.0)),
    mapped("loss_scale_window", "Engine.mix_precision.incr_every_n_steps"),
    mapped("hysteresis", "Engine.mix_precision.hysteresis"),
    mapped(
        "accumulate_allreduce_grads_in_fp32",
        "Engine.mix_precision.main_grad_fp32",
        lambda value: True if flag(value) else None,
        "not given: on anyway",
    ),
    joint("save", "Engine.save_load.output_dir", "not given: ./output, since a run always saves at its end"),
    joint(
        "load",
        "Engine.save_load.resume Engine.save_load.ckpt_dir Engine.save_load.init_from",
        "the directory of save: resume: auto; another: ckpt_dir, with finetune init_from",
    ),
    joint("finetune", "Engine.save_load.init_from", "weights of load alone, from step 0"),
    mapped("pretrained_checkpoint", "Engine.save_load.init_from"),
    joint("resume_training", "Engine.save_load.resume", "true: must find a checkpoint in save"),
    mapped("resume_crc_check", "Engine.save_load.verify"),
    fixed("ckpt_prefix", "a checkpoint is a directory epoch_E_step_S, whatever run wrote it"),
    fixed("ckpt_format", "checkpoints are written in the one format of docs/checkpoint_format.md"),
    mapped("keep_checkpoint_max", "Engine.save_load.keep_max"),
    mapped("no_load_optim", "Engine.save_load.load_optim", _inverted, "inverted"),
    mapped("no_load_rng", "Engine.save_load.load_rng", _inverted, "inverted"),
    mapped("new_dataset", "Engine.save_load.reset_data"),
    mapped("async_save", "Engine.save_load.async_save"),
    fixed("exit_on_missing_checkpoint", "a checkpoint that is named and not there is always an error"),
    fixed("no_save_optim", "a checkpoint holds the optimizer's state", _OFF),
    fixed("no_save_rng", "a checkpoint holds the generators' states", _OFF),
    refused("ckpt_step", "name the step's directory itself: --load DIR/epoch_0_step_100"),
    refused(
        "use_checkpoint_args",
        "the network is described by the arguments; print those of a checkpoint "
        "with tools/inspect_checkpoint.py",
    ),
    unused("save_retain_interval", "every checkpoint is kept, or the newest keep_checkpoint_max"),
    refused("rampup_batch_size", "the batch size is constant; train in two runs, the second with --load"),
    refused(
        "step_batch_size_schedule", "the batch size is constant; train in two runs, the second with --load"
    ),
    refused("exit_interval", "train_iters ends the run; lr_decay_iters keeps the schedule's length"),
    refused("exit_duration_in_mins", "end the run with SIGTERM (timeout 90m ...): it saves and resumes"),
    refused("iterations_to_skip", "no step can be left out"),
    refused("decoupled_lr", "one learning rate holds for all parameters"),
    refused("decoupled_min_lr", "one learning rate holds for all parameters"),
    refused("data_parallel_random_init", "replicas start equal"),
    fixed(
        "no_check_for_nan_in_loss_and_grad", "gradients that are not finite always end or skip a step", _OFF
    ),
)

DATA: tuple[Key, ...] = (
    joint(
        "data_path",
        "Data.Train.dataset.input_dir Data.Train.dataset.weights",
        "PREFIX, or WEIGHT PREFIX ..., or several PREFIXes: each is one pair .bin/.idx",
    ),
    joint("train_data_path", "Data.Train.dataset.input_dir Data.Train.dataset.weights", "all of it trains"),
    joint("valid_data_path", "Data.Eval.dataset.input_dir Data.Eval.dataset.weights", "all of it evaluates"),
    joint("test_data_path", "Data.Test.dataset.input_dir Data.Test.dataset.weights", "all of it tests"),
    joint("split", "Data.Train.dataset.split Data.Eval.dataset.split", "not given: 969, 30, 1"),
    joint("seq_length", "Data.Train.dataset.max_seq_len Data.Eval.dataset.max_seq_len", "tokens of a sample"),
    joint("micro_batch_size", "Global.micro_batch_size", "samples of a forward pass on one replica"),
    joint("global_batch_size", "Global.global_batch_size", "not given: micro_batch_size of each replica"),
    joint("micro_batch_num", "Engine.accumulate_steps", "micro batches of a step"),
    mapped("num_workers", "Data.Train.loader.num_workers"),
    joint("data_cache_path", "Data.Train.dataset.cache_dir Data.Eval.dataset.cache_dir", "of all data sets"),
    joint(
        "reset_position_ids", "Data.Train.dataset.reset_position_ids Data.Eval.dataset.reset_position_ids", ""
    ),
    joint(
        "reset_attention_mask",
        "Data.Train.dataset.reset_attention_mask Data.Eval.dataset.reset_attention_mask",
        "",
    ),
    joint("eod_mask_loss", "Data.Train.dataset.eod_mask_loss Data.Eval.dataset.eod_mask_loss", ""),
    joint("eos_token_id", "Data.Train.dataset.eod_id Data.Eval.dataset.eod_id", "end of a document"),
    fixed("pad_token_id", "no sample is padded"),
    mapped("drop_remainder", "Data.Train.sampler.drop_last"),
    joint("vocab_file", "Data.tokenizer.vocab_file Model.vocab_size", "with merge_file"),
    joint("merge_file", "Data.tokenizer.merges_file", "with vocab_file"),
    joint(
        "tokenizer_type",
        "Data.tokenizer Model.vocab_size",
        "GPT2BPETokenizer, HuggingFaceTokenizer or NullTokenizer",
    ),
    joint(
        "tokenizer_model", "Data.tokenizer.dir", "of HuggingFaceTokenizer: a directory with tokenizer.json"
    ),
    mapped("data_impl", (), choice({"mmap": {}, "infer": {}}), "mmap or infer: a pair .bin/.idx"),
    mapped("dataloader_type", (), choice({"single": {}}), "single: the order of the index maps"),
    *_not_built("fim_data fim_rate fim_spm_rate", "samples with a part moved to their end are not built"),
    refused("mock_data", "there is no made-up data; tools/make_stdlib_corpus.py makes a small corpus"),
)

OPTIMIZER: tuple[Key, ...] = (
    joint("optimizer", "Optimizer.name", "adam is AdamW; sgd needs sgd_momentum 0"),
    joint("sgd_momentum", "Optimizer.name", "0: there is no momentum here"),
    mapped("adam_beta1", "Optimizer.beta1"),
    mapped("adam_beta2", "Optimizer.beta2"),
    mapped("adam_eps", "Optimizer.epsilon"),
    joint("lr", "Optimizer.lr.max_lr", ""),
    joint("min_lr", "Optimizer.lr.min_lr", ""),
    joint("lr_decay_style", "Optimizer.lr.decay_style", "not given: linear"),
    joint("lr_decay_iters", "Optimizer.lr.decay_steps", "not given: all steps of the run"),
    joint("lr_decay_samples", "Optimizer.lr.decay_steps", "divided by global_batch_size"),
    joint("lr_warmup_iters", "Optimizer.lr.warmup_steps", ""),
    joint("lr_warmup_samples", "Optimizer.lr.warmup_steps", "divided by global_batch_size"),
    joint("lr_warmup_fraction", "Optimizer.lr.warmup_rate", "of lr_decay_iters"),
    joint("warmup", "Optimizer.lr.warmup_rate", "an older name of lr_warmup_fraction"),
    fixed("lr_warmup_init", "a warm-up begins at 0", (0, 0.0)),
    joint("lr_wsd_decay_iters", "Optimizer.lr.wsd_decay_steps", ""),
    joint("lr_wsd_decay_style", "Optimizer.lr.wsd_decay_style", ""),
    joint("use_checkpoint_opt_param_scheduler", "Engine.save_load.lr_schedule", "checkpoint"),
    joint("override_opt_param_scheduler", "Engine.save_load.lr_schedule", "config; neither: strict"),
    joint("weight_decay", "Optimizer.weight_decay", ""),
    joint("start_weight_decay", "Optimizer.weight_decay_schedule", "start"),
    joint("end_weight_decay", "Optimizer.weight_decay_schedule", "end"),
    joint("weight_decay_incr_style", "Optimizer.weight_decay_schedule", "constant, linear or cosine"),
)

PARALLEL: tuple[Key, ...] = (
    mapped("tensor_model_parallel_size", "Distributed.mp_degree"),
    mapped(
        "model_parallel_size", "Distributed.mp_degree", says="an older name of tensor_model_parallel_size"
    ),
    mapped("pipeline_model_parallel_size", "Distributed.pp_degree"),
    mapped("context_parallel_size", "Distributed.sep_degree"),
    joint(
        "context_parallel_algo", "Distributed.sep_degree", "ulysses_cp_algo alone: sequence parts for heads"
    ),
    joint(
        "cp_comm_type", "Distributed.sep_degree", "a2a alone; not given: a2a too, the results are the same"
    ),
    joint("ulysses_degree_in_cp", "Distributed.sep_degree", "must be context_parallel_size"),
    fixed("expert_model_parallel_size", "mixtures of experts are not built", (1,)),
    joint("sequence_parallel", "Model.sequence_parallel", "where the tensor-parallel size is above 1"),
    joint("virtual_pipeline_model_parallel_size", "Model.virtual_pp_degree", ""),
    joint("num_virtual_stages_per_pipeline_rank", "Model.virtual_pp_degree", ""),
    joint("num_layers_per_virtual_pipeline_stage", "Model.virtual_pp_degree", "layers / stages / it"),
    joint("num_layer_list", "Distributed.pp_layers", "`[a, b]`, or `[[a, b], [c, d]]` by virtual stage"),
    joint("noop_layers", "Distributed.noop_layers", "empty places; num_layers counts them there, not here"),
    joint("decoder_first_pipeline_num_layers", "Distributed.pp_layers", "layers of the first stage"),
    joint("decoder_last_pipeline_num_layers", "Distributed.pp_layers", "layers of the last stage"),
    joint("account_for_embedding_in_pipeline_split", "Distributed.pp_layers", "a layer less in the first"),
    joint("account_for_loss_in_pipeline_split", "Distributed.pp_layers", "a layer less in the last"),
    joint("use_distributed_optimizer", "Distributed.sharding.sharding_degree", "stage 1 over the replicas"),
    joint("zero_stage", "Distributed.sharding.sharding_stage", "DeepSpeed's: 0 is none"),
    joint("cpu_optimizer", "Distributed.sharding.sharding_offload", "with zero_stage 2 or 3"),
    joint("no_pipeline_parallel", "Distributed.pp_degree", "1"),
    joint("deepspeed", (), "reads deepspeed_config"),
    joint("deepspeed_config", (), "a file of DeepSpeed's keys, see below"),
    fixed("expert_tensor_parallel_size", "of experts alone, and num_experts is refused"),
    refused("pipeline_model_parallel_layout", "give the layers of each stage: --num-layer-list '[...]'"),
    joint("use_torch_fsdp2", "Distributed.sharding.sharding_stage", "3 over the replicas"),
    joint("use_megatron_fsdp", "Distributed.sharding.sharding_stage", "data_parallel_sharding_strategy"),
    joint(
        "data_parallel_sharding_strategy",
        "Distributed.sharding.sharding_stage",
        "no_shard, optim, optim_grads, optim_grads_params: 0 to 3 with use_megatron_fsdp",
    ),
)

PROFILE: tuple[Key, ...] = (
    mapped("profile", "Profiler.enable"),
    joint("profile_step_start", "Profiler.scheduler", "first step"),
    joint("profile_step_end", "Profiler.scheduler", "the step before which it ends"),
    mapped("profile_save_path", "Profiler.profiler_log"),
    mapped("profile_memory", "Profiler.profile_memory"),
    joint(
        "profile_level",
        "Profiler.detailed Profiler.record_shapes",
        "level1 records shapes, level2 detail too",
    ),
    mapped("profile_communication", "Profiler.summary.dist"),
    mapped("profile_op_time", "Profiler.summary.op"),
    mapped("profile_ranks", (), choice({"0": {}, 0: {}}), "the main rank, 0, is profiled"),
    fixed("use_pytorch_profiler", "paddle.profiler is used"),
    fixed("profile_with_stack", "call stacks are not recorded", _OFF),
    fixed("profile_framework", "the processor and the device are both recorded", ("all", None)),
    fixed("profile_parallel_strategy", "the plan is in the log of every run"),
    fixed("profile_data_process", "the time spent waiting for data is in every log line"),
    fixed("profile_data_simplification", "traces are written whole", _OFF),
    fixed("profile_offline_analyse", "a trace is analysed when it is written", _OFF),
    refused("profile_dynamic_profiler_config_path", "a profile cannot be started from outside the run"),
    *(
        fixed(name, "a counter of Ascend's hardware, which Paddle's profiler does not read", values)
        for name, values in (
            ("profile_aicore_metrics", (0, -1)),
            ("profile_l2_cache", _OFF),
            ("profile_hbm_ddr", _OFF),
            ("profile_pcie", _OFF),
        )
    ),
)

OTHERS: tuple[Key, ...] = (
    joint("distributed_backend", "Global.device", "hccl: npu, where Paddle has it; others decide nothing"),
    joint("device_target", "Global.device", "Ascend: npu, where Paddle has it; GPU: gpu; CPU: cpu"),
    *_same_for_all("use_cpu_initialization use_mcore_models use_legacy_models", "there is one way to do it"),
    *_same_for_all(
        "overlap_grad_reduce overlap_param_gather delay_grad_reduce overlap_p2p_communication "
        "no_overlap_p2p_communication tp_comm_overlap no_async_tensor_model_parallel_allreduce "
        "no_scatter_gather_tensors_in_pipeline bucket_size ddp_bucket_size enable_mem_align "
        "wrap_with_ddp ddp_average_in_collective no_contiguous_buffers_in_local_ddp ddp_impl "
        "use_ring_exchange_p2p align_param_gather align_grad_reduce",
        _SPEED,
    ),
    *_same_for_all(
        "use_fused_swiglu apply_rope_fusion no_rope_fusion use_fused_rmsnorm use_fused_rotary_pos_emb "
        "no_masked_softmax_fusion masked_softmax_fusion no_bias_dropout_fusion no_bias_swiglu_fusion "
        "no_gradient_accumulation_fusion gradient_accumulation_fusion no_persist_layer_norm "
        "cross_entropy_loss_fusion bias_dropout_fusion bias_swiglu_fusion use_flash_attn_v2 "
        "use_fused_ring_attention_update",
        "which operations share a kernel changes speed alone",
    ),
    *_same_for_all("deterministic_mode", "runs repeat bit by bit on CPUs; on GPUs set Global.flags"),
    *_same_for_all("calculate_per_token_loss", _ALWAYS),
    *_many(
        "tensorboard_dir tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard "
        "log_batch_size_to_tensorboard log_validation_ppl_to_tensorboard log_memory_to_tensorboard "
        "log_world_size_to_tensorboard log_learning_rate_to_tensorboard log_loss_scale_to_tensorboard "
        "no_log_learnig_rate_to_tensorboard no_log_loss_scale_to_tensorboard "
        "log_optimizer_states_to_tensorboard wandb_project wandb_exp_name wandb_save_dir",
        "metrics.jsonl and VisualDL hold the curves",
    ),
    *_many(
        "log_params_norm log_num_zeros_in_grad log_throughput log_progress log_memory_interval "
        "log_straggler log_energy timing_log_level timing_log_option barrier_with_l1_time "
        "no_barrier_with_level_1_timing logging_level",
        "the log line has one form",
    ),
    *_many(
        "local_rank lazy_mpu_init distributed_timeout_minutes use_dist_ckpt exit_signal_handler "
        "manual_gc manual_gc_interval manual_gc_eval adlr_autoresume adlr_autoresume_interval "
        "dist_ckpt_format auto_detect_ckpt_format dist_ckpt_strictness ckpt_fully_parallel_save "
        "ckpt_fully_parallel_load ckpt_assume_constant_structure enable_ft_package "
        "no_initialization num_dataset_builder_threads one_logger_project one_logger_run_name "
        "enable_one_logger no_mmap_bin_files no_create_attention_mask_in_dataloader",
        "the launcher's, or another program's machinery",
    ),
    *_many(
        "use_persistent_ckpt_worker dist_ckpt_optim_fully_reshardable no_ckpt_fully_parallel_save "
        "async_strategy async_ckpt_use_cpu_shm verify_integrity disable_gloo_process_groups "
        "straggler_minmax_count no_record_throughput wandb_entity "
        "no_use_tokenizer_model_from_checkpoint_args export_te_mcore_model te_rng_tracker "
        "check_weight_hash_across_dp_replicas_interval rerun_mode error_injection_rate "
        "error_injection_type test_mode enable_experimental",
        "the launcher's, or another program's machinery",
    ),
    *_same_for_all(
        "use_tp_pp_dp_mapping cross_entropy_fusion_impl cuda_graph_impl cuda_graph_modules "
        "cuda_graph_warmup_steps enable_cuda_graph num_distributed_optimizer_instances "
        "empty_unused_memory_level ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw "
        "overlap_p2p_communication_warmup_flush high_priority_stream_groups "
        "microbatch_group_size_per_virtual_pipeline_stage defer_embedding_wgrad_compute "
        "wgrad_deferral_limit overlap_param_gather_with_optimizer_step "
        "tp_comm_overlap_cfg "
        "fine_grained_activation_offloading offload_modules hierarchical_context_parallel_sizes "
        "use_fused_weighted_squared_relu",
        _SPEED,
    ),
    *(
        fixed(name, "masters and states of the optimizer are float32", ("fp32",))
        for name in (
            "main_grads_dtype",
            "main_params_dtype",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
            "megatron_fsdp_main_params_dtype",
            "megatron_fsdp_main_grads_dtype",
            "megatron_fsdp_grad_comm_dtype",
        )
    ),
    fixed("grad_reduce_in_bf16", "gradients travel in the type that they have", _OFF),
    *_many(
        "npu_deterministic jit_compile use_mc2 use_ascend_coc reuse_fp32_param "
        "use_fusion_attn_v2 swap_attention memory_fragmentation",
        "Ascend's machinery",
    ),
)

TABLES = {
    "model": MODEL,
    "recomputation": RECOMPUTE,
    "training": TRAINING,
    "data": DATA,
    "optimizer": OPTIMIZER,
    "parallelism": PARALLEL,
    "profiler": PROFILE,
    "others": OTHERS,
}

ARGUMENTS = KeyTable([key for group in TABLES.values() for key in group], normal_name)
