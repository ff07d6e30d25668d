"""What the keys of DeepSpeed's JSON mean here, where Megatron-DeepSpeed reads one."""

from __future__ import annotations

from ppfleetx.dialects.keys import Key, fixed, joint, mapped, refused, unused
from ppfleetx.dialects.translate import number

PREFIX = "deepspeed_config"
_SPEED = "speed or memory alone: no number changes"
_ZERO = "Distributed.sharding"


def _keys() -> tuple[Key, ...]:
    keys = [
        joint("train_batch_size", "Global.global_batch_size", "must be --global-batch-size"),
        joint("train_micro_batch_size_per_gpu", "Global.micro_batch_size", "must be --micro-batch-size"),
        joint("gradient_accumulation_steps", "Engine.accumulate_steps", ""),
        joint("zero_optimization.stage", f"{_ZERO}.sharding_stage", "0 is none"),
        joint("zero_optimization.cpu_offload", f"{_ZERO}.sharding_offload", "with stage 2 or 3"),
        joint("zero_optimization.offload_optimizer.device", f"{_ZERO}.sharding_offload", "cpu or none"),
        fixed("zero_optimization.offload_param.device", "parameters stay on the device", ("none",)),
        mapped("gradient_clipping", "Optimizer.grad_clip.clip_norm", lambda value: number(value)),
        joint("fp16.enabled", "Engine.mix_precision.enable Engine.mix_precision.dtype", "float16"),
        joint("bf16.enabled", "Engine.mix_precision.enable Engine.mix_precision.dtype", "bfloat16"),
        joint("bfloat16.enabled", "Engine.mix_precision.enable Engine.mix_precision.dtype", "bfloat16"),
        joint("fp16.loss_scale", "Engine.mix_precision.scale_loss", "0: dynamic"),
        joint("fp16.initial_scale_power", "Engine.mix_precision.scale_loss", "2 to this power"),
        mapped("fp16.loss_scale_window", "Engine.mix_precision.incr_every_n_steps"),
        mapped("fp16.hysteresis", "Engine.mix_precision.hysteresis"),
        fixed("fp16.min_loss_scale", "the smallest scale is 1", (1, 1.0)),
        fixed("fp16.auto_cast", "inputs are token ids"),
        fixed("fp16.consecutive_hysteresis", "the tolerance comes back when the scale grows", (False,)),
        fixed(
            "prescale_gradients",
            "gradients are summed in float32, where the order of a division is no matter",
        ),
        fixed("gradient_predivide_factor", "gradients are summed in float32"),
        fixed("communication_data_type", "gradients are summed in float32"),
        fixed("fp32_allreduce", "gradients are summed in float32"),
        fixed("sparse_gradients", "gradients are dense", (False,)),
        fixed("seq_parallel_communication_data_type", "gradients are summed in float32"),
        unused("steps_per_print", "--log-interval says how often a line is logged"),
        unused("zero_optimization.*", _SPEED),
        unused("zero_optimization.offload_optimizer.*", _SPEED),
        unused("zero_optimization.offload_param.*", _SPEED),
        unused("activation_checkpointing.*", _SPEED),
        unused("zero_allow_untested_optimizer", "every optimizer is tested with every stage"),
        unused("zero_force_ds_cpu_optimizer", "there is one update in host memory"),
        unused("zero_force_ds_cpu_initialization", "there is one way to start"),
        *(
            unused(name, "metrics.jsonl and the log line hold what a run measures")
            for name in (
                "wall_clock_breakdown",
                "memory_breakdown",
                "dump_state",
                "flops_profiler.*",
                "tensorboard.*",
                "wandb.*",
                "csv_monitor.*",
                "comms_logger.*",
                "comms_logger.**",
            )
        ),
        unused("aio.*", _SPEED),
        unused("checkpoint.*", "checkpoints have one form"),
        unused("load_universal_checkpoint", "a checkpoint fits every plan"),
        unused("data_types.*", "gradients are summed in float32"),
        *(
            refused(name, why)
            for name, why in (
                (
                    "optimizer.**",
                    "Megatron's arguments (--lr, --adam-beta1, ...) say it; take it out of this file",
                ),
                (
                    "scheduler.**",
                    "Megatron's arguments (--lr-decay-style, ...) say it; take it out of this file",
                ),
                ("curriculum_learning.**", "lengths do not change within a run"),
                ("data_efficiency.**", "samples are read as they are"),
                ("compression_training.**", "compression is not built"),
                ("progressive_layer_drop.**", "every layer is computed"),
                ("sparse_attention.**", "attention is dense"),
                ("eigenvalue.**", "it is not built"),
                ("amp.**", "use fp16 or bf16"),
                ("elasticity.**", "the batch size does not follow the number of processes"),
                ("autotuning.**", "use tools/plan.py"),
            )
        ),
    ]
    return tuple(
        Key(f"{PREFIX}.{key.name}", key.kind, key.to, key.convert, key.accepts, key.says) for key in keys
    )


KEYS = _keys()
