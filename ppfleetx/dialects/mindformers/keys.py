"""What each key of a MindFormers configuration means here (v0.3, and keys that later versions renamed)."""

from __future__ import annotations

from ppfleetx.dialects.keys import Key, KeyTable, fixed, joint, mapped, refused, unused
from ppfleetx.dialects.translate import choice, flag, integer, number

CHECKPOINT = "Engine.save_load.ckpt_dir Engine.save_load.init_from"
PRECISION = "Engine.mix_precision.enable Engine.mix_precision.dtype Engine.mix_precision.level"
DEGREES = "Distributed.dp_degree Distributed.mp_degree Distributed.pp_degree"
SHARDING = "Distributed.sharding.sharding_degree Distributed.sharding.sharding_stage"
BATCH = "Global.micro_batch_size Global.local_batch_size"
_OPTIMIZERS = dict.fromkeys(
    ("FusedAdamWeightDecay", "FP32StateAdamWeightDecay", "AdamWeightDecay", "AdamW"), "AdamW"
)
_COLUMNS = (["input_ids"], ["input_ids", "input_mask"], ["input_ids", "attention_mask"])
_COMPILER = "MindSpore's compiler and its data engine are not here"
_CLOUD = "there is no ModelArts here"
_ASCEND = "it is about Ascend devices"


def _run() -> list[Key]:
    return [
        joint(
            "base_config", (), "files that this one is laid over; of two that hold one block, the later one"
        ),
        mapped("seed", "Global.seed"),
        joint("run_mode", "Model.module", "train, finetune, eval or predict; decides which program runs"),
        joint("use_parallel", DEGREES, "False: one process, and parallel_config is not used"),
        mapped("output_dir", "Engine.save_load.output_dir"),
        joint(
            "resume_or_finetune_checkpoint",
            CHECKPOINT,
            "train: resumed; finetune: its weights begin a new run; eval and predict: what is used",
        ),
        joint("load_checkpoint", CHECKPOINT, "later versions' name of resume_or_finetune_checkpoint"),
        joint(
            "resume_training",
            CHECKPOINT,
            "train with load_checkpoint: False begins a new run from its weights",
        ),
        joint("input_data", "Generation.prompt Generation.prompt_file", "predict: see --predict_data"),
        fixed(
            "do_eval",
            "no evaluation runs during training in v0.3; evaluate with run_mode eval",
            only=(False,),
        ),
        unused("eval_step_interval", "no evaluation runs during training"),
        unused("eval_epoch_interval", "no evaluation runs during training"),
        unused("auto_tune", _COMPILER),
        unused("autotune_per_step", _COMPILER),
        unused("filepath_prefix", _COMPILER),
        mapped("profile", "Profiler.enable", flag),
        joint("profile_start_step", "Profiler.scheduler", "first step profiled"),
        joint("profile_stop_step", "Profiler.scheduler", "step before which the profile ends"),
        unused("init_start_profile", _ASCEND),
        unused("profile_communication", "communication is always in the profile"),
        mapped("profile_memory", "Profiler.profile_memory", flag),
        fixed("layer_scale", "every layer has one learning rate", only=(False,)),
        unused("layer_decay", "only layer_scale reads it"),
        fixed("lr_scale", "give the rate itself in lr_schedule.learning_rate", only=(False,)),
        unused("lr_scale_factor", "only lr_scale reads it"),
        fixed("micro_batch_interleave_num", "a micro batch is not cut further", only=(1,)),
        fixed("auto_trans_ckpt", "a checkpoint of any plan is loaded under any other"),
        fixed("only_save_strategy", "checkpoints need no strategy files", only=(False,)),
        unused("src_strategy_path_or_dir", "checkpoints need no strategy files"),
        unused("transform_process_num", "checkpoints need no strategy files"),
        unused("remote_save_url", _CLOUD),
        unused("aicc_config.**", _CLOUD),
        unused("eval_callbacks.**", "evaluation has none"),
        fixed("trainer.type", "it is the trainer of GPT", only=("CausalLanguageModelingTrainer",)),
        unused("trainer.model_name", "model.model_config says what is built"),
        fixed("metric.type", "evaluation gives loss and perplexity, by tokens", only=("PerplexityMetric",)),
    ]


def _context() -> list[Key]:
    return [
        fixed("context.mode", "there is one mode, the dynamic one", only=(0, 1)),
        joint(
            "context.device_target",
            "Global.device",
            "Ascend: npu, or auto where the Paddle installed here has none; GPU: gpu; CPU: cpu",
        ),
        unused("context.device_id", "the launcher gives each rank its device"),
        joint(
            "context.max_device_memory",
            "Global.flags",
            "FLAGS_gpu_memory_limit_mb; nothing on a CPU, nor on Ascend",
        ),
        unused("context.enable_graph_kernel", _COMPILER),
        unused("context.graph_kernel_flags", _COMPILER),
        unused("context.max_call_depth", _COMPILER),
        unused("context.save_graphs", _COMPILER),
        unused("context.save_graphs_path", _COMPILER),
        unused("context.variable_memory_max_size", _ASCEND),
    ]


def _parallel() -> list[Key]:
    return [
        joint(
            "parallel.parallel_mode",
            DEGREES,
            "0: every process is a data-parallel rank; 1: as parallel_config says; 2 and 3 are refused",
        ),
        fixed("parallel.gradients_mean", "the loss is the mean over all valid tokens of the global batch"),
        fixed("parallel.loss_repeated_mean", "the loss is counted once, whatever the plan"),
        fixed(
            "parallel.full_batch",
            "each data-parallel rank reads its own part, and batch_size counts per such rank",
        ),
        unused("parallel.enable_alltoall", "only mixtures of experts use it"),
        unused("parallel.search_mode", "only parallel_mode 2 searches"),
        joint("parallel.enable_parallel_optimizer", SHARDING, "where optimizer_shard does not say it"),
        unused("parallel.strategy_ckpt_save_file", "checkpoints need no strategy files"),
        unused("parallel.strategy_ckpt_load_file", "checkpoints need no strategy files"),
        unused("parallel.pipeline_stages", "parallel_config.pipeline_stage says it"),
        unused("parallel.device_num", "the launcher says how many processes there are"),
        refused(
            "parallel.parallel_optimizer_config.**", "the optimizer is divided over all of data_parallel"
        ),
        joint(
            "parallel_config.data_parallel", f"{DEGREES} {SHARDING}", "with optimizer_shard: sharding_degree"
        ),
        joint("parallel_config.model_parallel", "Distributed.mp_degree", "tensor parallelism"),
        joint(
            "parallel_config.pipeline_stage",
            "Distributed.pp_degree Distributed.pp_layers",
            "layers that do not divide: block i to stage min(i // max((L + 1) // pp, 1), pp - 1)",
        ),
        fixed("parallel_config.expert_parallel", "mixtures of experts are not built", only=(1,)),
        joint(
            "parallel_config.optimizer_shard",
            SHARDING,
            "True: data_parallel becomes the sharding degree, at stage 1 (stage 3 with "
            "parallel_optimizer_comm_recompute)",
        ),
        joint(
            "parallel_config.micro_batch_num", BATCH, "micro batches a step; not used with pipeline_stage 1"
        ),
        fixed(
            "parallel_config.vocab_emb_dp", "rows of the table are divided over model_parallel; same results"
        ),
        unused("parallel_config.gradient_aggregation_group", "gradients are summed once a step, by size"),
        joint("parallel_config.use_seq_parallel", "Model.sequence_parallel", "of later versions"),
        fixed("moe_config.expert_num", "mixtures of experts are not built", only=(1,)),
        unused("moe_config.*", "mixtures of experts are not built"),
        joint(
            "recompute_config.recompute",
            "Model.use_recompute Model.recompute_granularity",
            "whole layers are recomputed in the backward pass",
        ),
        joint(
            "recompute_config.parallel_optimizer_comm_recompute",
            SHARDING,
            "True with optimizer_shard: parameters are fetched again in the backward pass (stage 3)",
        ),
        fixed("recompute_config.mp_comm_recompute", "recomputing runs the exchange again; same results"),
        fixed(
            "recompute_config.recompute_slice_activation",
            "saves memory only; what a recomputed layer keeps is divided with use_seq_parallel",
        ),
        fixed("recompute_config.select_recompute", "whole layers are recomputed, or none", only=(False,)),
    ]


def _runner() -> list[Key]:
    wrapper = "one step exists: forward, backward, clip, update"
    return [
        joint("runner_config.epochs", "Engine.run_mode Engine.num_train_epochs", "passes over the corpus"),
        joint("runner_config.batch_size", BATCH, "sequences per forward pass of a data-parallel rank"),
        unused("runner_config.sink_mode", _COMPILER),
        unused("runner_config.sink_size", _COMPILER),
        unused(
            "runner_config.per_epoch_size", "a loop of the device; epochs are passes over the corpus here"
        ),
        unused("runner_config.image_size", "there are no images"),
        fixed("runner_config.initial_epoch", "a checkpoint knows where it stands", only=(0,)),
        fixed("runner_config.has_trained_epoches", "a checkpoint knows where it stands", only=(0,)),
        fixed("runner_config.has_trained_steps", "a checkpoint knows where it stands", only=(0,)),
        fixed("runner_config.gradient_accumulation_steps", "micro_batch_num says it", only=(1,)),
        fixed(
            "runner_wrapper.type",
            wrapper,
            only=("MFTrainOneStepCell", "MFPipelineWithLossScaleCell", "TrainOneStepWithLossScaleCell"),
        ),
        mapped(
            "runner_wrapper.scale_sense.type",
            "Engine.mix_precision.use_dynamic_loss_scaling",
            choice({"DynamicLossScaleUpdateCell": True, "FixedLossScaleUpdateCell": False}),
            "DynamicLossScaleUpdateCell: true, FixedLossScaleUpdateCell: false",
        ),
        mapped("runner_wrapper.scale_sense.loss_scale_value", "Engine.mix_precision.scale_loss", number),
        fixed("runner_wrapper.scale_sense.scale_factor", "the scale is doubled and halved", only=(2, 2.0)),
        mapped("runner_wrapper.scale_sense.scale_window", "Engine.mix_precision.incr_every_n_steps"),
        mapped(
            "runner_wrapper.use_clip_grad",
            "Optimizer.grad_clip.clip_norm",
            lambda value: 1.0 if flag(value) else 0.0,
            "True: 1.0, the norm over all parameters; False: 0, which is off",
        ),
        mapped(
            "optimizer.type",
            "Optimizer.name",
            choice(_OPTIMIZERS),
            "AdamW, which corrects the moments' bias in the first steps; FusedAdamWeightDecay does not",
        ),
        mapped("optimizer.beta1", "Optimizer.beta1"),
        mapped("optimizer.beta2", "Optimizer.beta2"),
        mapped("optimizer.betas", "Optimizer.beta1 Optimizer.beta2", _betas, "the two in a list"),
        mapped("optimizer.eps", "Optimizer.epsilon"),
        mapped("optimizer.weight_decay", "Optimizer.weight_decay", says="on matrices and tables, as there"),
        joint("optimizer.learning_rate", "Optimizer.lr.max_lr", "where lr_schedule has none"),
        joint(
            "lr_schedule.type",
            "Optimizer.lr.decay_style",
            "polynomial and linear: linear; cosine: cosine; constant_with_warmup: constant",
        ),
        joint("lr_schedule.learning_rate", "Optimizer.lr.max_lr", "the rate after the warm-up"),
        joint("lr_schedule.lr_end", "Optimizer.lr.min_lr", "the last rate, which is never passed; linear: 0"),
        joint("lr_schedule.warmup_steps", "Optimizer.lr.warmup_steps", "where there is no warmup_ratio"),
        joint(
            "lr_schedule.warmup_ratio", "Optimizer.lr.warmup_rate", "a share of all steps; above warmup_steps"
        ),
        refused(
            "lr_schedule.warmup_epochs",
            "give the warm-up in steps (warmup_steps) or as a share (warmup_ratio)",
        ),
        fixed("lr_schedule.warmup_lr_init", "the warm-up begins at 0", only=(0, 0.0)),
        mapped(
            "lr_schedule.total_steps",
            "Optimizer.lr.decay_steps",
            lambda value: None if value == -1 else integer(value),
            "-1: all steps of the run",
        ),
        fixed("lr_schedule.power", "the decay is linear", only=(1, 1.0)),
        fixed("lr_schedule.num_cycles", "half a wave", only=(0.5,)),
    ]


def _betas(value: object) -> dict[str, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("must be a list of two numbers")
    return {"Optimizer.beta1": value[0], "Optimizer.beta2": value[1]}


def _data() -> list[Key]:
    keys = []
    for block, split in (("train_dataset", "Train"), ("eval_dataset", "Eval")):
        text = (
            ""
            if split == "Train"
            else "; a .txt or .tokens file is evaluated as text (Offline_Eval.eval_path)"
        )
        limit = (
            refused(
                f"{block}.data_loader.num_samples", "make a smaller corpus; epochs says how often it is read"
            )
            if split == "Train"
            else joint(f"{block}.data_loader.num_samples", "Engine.eval_iters", "rounded up to whole batches")
        )
        keys += [
            fixed(
                f"{block}.data_loader.type",
                "corpora are .bin/.idx files",
                only=("MindDataset", "TFRecordDataset"),
            ),
            joint(
                f"{block}.data_loader.dataset_dir",
                f"Data.{split}.dataset.input_dir",
                f"a corpus of .bin/.idx{text}",
            ),
            fixed(
                f"{block}.data_loader.shuffle",
                "training shuffles, evaluation need not",
                only=(True,) if split == "Train" else None,
            ),
            limit,
            fixed(
                f"{block}.input_columns", "a corpus has token ids alone; masks are all ones", only=_COLUMNS
            ),
            unused(f"{block}.output_columns", "a corpus has token ids alone"),
            unused(f"{block}.column_order", "a corpus has token ids alone"),
            joint(
                f"{block}.num_parallel_workers",
                f"Data.{split}.loader.num_workers",
                "threads that prepare batches",
            ),
            unused(f"{block}.python_multiprocessing", "workers are threads"),
            fixed(
                f"{block}.drop_remainder",
                "of a corpus, the last incomplete batch is left out (a note says so); a text is read whole",
                only=(True,) if split == "Train" else (True, False),
            ),
            fixed(f"{block}.batch_size", "runner_config.batch_size says it, there as here"),
            fixed(f"{block}.repeat", "runner_config.epochs says it", only=(1,)),
            fixed(f"{block}.tokenizer.type", "a corpus has token ids alone", only=("GPT2Tokenizer",)),
            unused(f"{block}.tokenizer.max_length", "model.model_config.seq_length says it"),
            unused(f"{block}.numa_enable", _COMPILER),
            unused(f"{block}.prefetch_size", _COMPILER),
            unused(f"{block}.auto_tune", _COMPILER),
            unused(f"{block}.filepath_prefix", _COMPILER),
            unused(f"{block}.autotune_per_step", _COMPILER),
            unused(f"{block}.profile", _COMPILER),
            fixed(f"{block}_task.type", "it is the data of GPT", only=("CausalLanguageModelDataset",)),
            fixed(f"{block}_task.dataset_config.**", f"{block} says it"),
        ]
    return keys


def _callbacks() -> list[Key]:
    return [
        fixed(
            "callbacks.*.type",
            "their options follow",
            only=(
                "MFLossMonitor",
                "SummaryMonitor",
                "CheckpointMointor",
                "CheckpointMonitor",
                "ObsMonitor",
                "ProfileMonitor",
            ),
        ),
        joint("callbacks.*.per_print_times", "Engine.logging_freq", "MFLossMonitor; 1 where it says nothing"),
        unused("callbacks.*.keep_default_action", "metrics.jsonl holds every step"),
        unused("callbacks.*.prefix", "checkpoints are named epoch_E_step_S"),
        joint(
            "callbacks.*.save_checkpoint_steps", "Engine.save_load.save_steps", "steps between checkpoints"
        ),
        fixed("callbacks.*.save_checkpoint_seconds", "checkpoints are written by steps", only=(0,)),
        joint("callbacks.*.keep_checkpoint_max", "Engine.save_load.keep_max", "5 where it says nothing"),
        fixed("callbacks.*.integrated_save", "each rank writes its part, and any plan reads all of them"),
        joint("callbacks.*.async_save", "Engine.save_load.async_save", "in the background"),
        unused("callbacks.*.save_network_params", "a checkpoint has parts that can be loaded alone"),
        fixed("callbacks.*.save_trainable_params", "checkpoints are whole", only=(False,)),
        joint("callbacks.*.directory", "Engine.save_load.output_dir", "where checkpoints go"),
    ]


def _model() -> list[Key]:
    model = "model.model_config"
    return [
        fixed("model.arch.type", "it is the model of GPT", only=("GPT2LMHeadModel",)),
        fixed(f"{model}.type", "it is the model of GPT", only=("GPT2Config",)),
        joint(
            f"{model}.seq_length",
            "Model.max_position_embeddings Data.Train.dataset.max_seq_len Data.Eval.dataset.max_seq_len "
            "Offline_Eval.max_seq_len",
            "windows of the corpus have one token more",
        ),
        mapped(f"{model}.vocab_size", "Model.vocab_size", says="padded to a multiple of 128"),
        mapped(f"{model}.embedding_size", "Model.hidden_size"),
        mapped(f"{model}.hidden_size", "Model.hidden_size", says="later versions' name of embedding_size"),
        mapped(f"{model}.num_layers", "Model.num_layers"),
        mapped(f"{model}.num_heads", "Model.num_attention_heads"),
        joint(f"{model}.expand_ratio", "Model.ffn_hidden_size", "times the width; 4 where it says nothing"),
        mapped(
            f"{model}.hidden_act",
            "Model.hidden_act",
            choice({"gelu": "gelu", "fast_gelu": "quick_gelu", "relu": "relu"}),
            "gelu: gelu (the tanh form, as there), fast_gelu: quick_gelu, relu: relu",
        ),
        mapped(f"{model}.dropout_prob", "Model.embedding_dropout_prob"),
        mapped(f"{model}.hidden_dropout_prob", "Model.hidden_dropout_prob"),
        mapped(f"{model}.attention_probs_dropout_prob", "Model.attention_probs_dropout_prob"),
        mapped(f"{model}.hidden_dropout_rate", "Model.hidden_dropout_prob", says="later versions' name"),
        mapped(
            f"{model}.attention_dropout_rate",
            "Model.attention_probs_dropout_prob",
            says="later versions' name",
        ),
        mapped(f"{model}.use_flash_attention", "Model.use_flash_attn", flag),
        joint(
            f"{model}.max_position_embeddings",
            "Model.max_position_embeddings",
            "seq_length where it says nothing",
        ),
        refused(
            f"{model}.pet_config.**", "translate the rest with ppfleetx translate, and give Model.lora there"
        ),
        fixed(f"{model}.batch_size", "runner_config.batch_size says it"),
        mapped(
            f"{model}.initializer_range",
            "Model.embedding_initializer_range",
            says="of both tables; linears start with 0.01, as there",
        ),
        joint(f"{model}.compute_dtype", PRECISION, "float32: no 16 bits; on a CPU always float32"),
        joint(f"{model}.param_init_type", PRECISION, "16 bits: weights in 16 bits with float32 masters (O2)"),
        joint(f"{model}.softmax_dtype", "Model.softmax_in_fp32", "float32: true"),
        joint(
            f"{model}.softmax_compute_type", "Model.softmax_in_fp32", "later versions' name of softmax_dtype"
        ),
        fixed(f"{model}.layernorm_compute_type", "norms compute in float32", only=("float32", "float16")),
        fixed(f"{model}.layernorm_dtype", "norms compute in float32", only=("float32", "float16")),
        joint(
            f"{model}.checkpoint_name_or_path",
            CHECKPOINT,
            "eval and predict: a directory; names need a download",
        ),
        mapped(
            f"{model}.eos_token",
            "Generation.eos_token_id",
            says="ends a continuation, which it did not there",
        ),
        mapped(f"{model}.eos_token_id", "Generation.eos_token_id"),
        unused(f"{model}.bos_token_id", "the tokenizer knows it"),
        unused(f"{model}.pad_token_id", "the tokenizer knows it"),
        mapped(
            f"{model}.repetition_penalty", "Generation.repetition_penalty", says="divides logits, as usual"
        ),
        joint(
            f"{model}.max_decode_length",
            "Generation.max_dec_len",
            "prompt and continuation together there, new tokens here: what the longest prompt leaves",
        ),
        mapped(f"{model}.top_k", "Generation.top_k"),
        mapped(f"{model}.top_p", "Generation.top_p"),
        mapped(
            f"{model}.do_sample",
            "Generation.decode_strategy",
            lambda value: "sampling" if flag(value) else "greedy_search",
            "True: sampling, False: greedy_search",
        ),
        mapped(f"{model}.use_past", "Generation.use_cache", flag),
        unused("processor.type", "there is one processor"),
        unused("processor.return_tensors", "there is one kind of tensors"),
        unused("processor.max_length", "prompts are not padded"),
        unused("processor.padding", "prompts are not padded"),
        fixed("processor.tokenizer.type", "byte-level BPE", only=("GPT2Tokenizer",)),
        joint("processor.tokenizer.vocab_file", "Data.tokenizer.vocab_file", "vocab.json"),
        joint("processor.tokenizer.merges_file", "Data.tokenizer.merges_file", "merges.txt"),
        joint("processor.tokenizer.eos_token", "Data.tokenizer.eos_token", "with vocab_file and merges_file"),
        unused("processor.tokenizer.unk_token", "byte-level BPE knows every text"),
        unused("processor.tokenizer.bos_token", "prompts get no tokens before them"),
        unused("processor.tokenizer.pad_token", "prompts are not padded"),
    ]


TABLE = KeyTable(
    [*_run(), *_context(), *_parallel(), *_runner(), *_data(), *_callbacks(), *_model()],
)
