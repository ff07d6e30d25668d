"""Rules for Megatron arguments that depend on each other: batches, precision, schedule, checkpoints."""

from __future__ import annotations

import math
import os
from typing import Any

from ppfleetx.dialects.given import Given
from ppfleetx.dialects.translation import Rule, Translation
from ppfleetx.utils.devices import CPU, GPU, NPU, expected_device, of_recipe

_DEFAULT = "its default"
_TYPES = {
    "float32": None,
    "fp32": None,
    "float16": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
_STYLES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_square_root",
    "WSD": "wsd",
}
_FP16 = "deepspeed_config.fp16"
_CURRICULUM = "deepspeed_config.curriculum_learning"


def defaults_rule(log: str, *, log_interval: int) -> Rule:
    """Make the rule for defaults of a toolkit that differ from ours.

    Args:
        log: the callback that writes the toolkit's log lines.
        log_interval: its default number of steps between log lines.
    """

    def defaults(run: Translation) -> None:
        for name, key, value in (
            ("seed", "Global.seed", 1234),
            ("log_interval", "Engine.logging_freq", log_interval),
            ("eval_interval", "Engine.eval_freq", 1000),
        ):
            if name not in run:
                run.put(key, value, why="its default")
        run.put("Engine.callbacks", ["default", log], why="its own log lines beside ours")
        workers = run.integer("num_workers", least=0)
        if workers is not None and "Data.Eval.dataset.input_dir" in run.native:
            run.put("Data.Eval.loader.num_workers", workers, "num_workers")

    return defaults


def batches(run: Translation) -> None:
    """Translate micro batch, global batch and steps."""
    deepspeed = {
        "Global.global_batch_size": ("global_batch_size", "deepspeed_config.train_batch_size"),
        "Global.micro_batch_size": ("micro_batch_size", "deepspeed_config.train_micro_batch_size_per_gpu"),
        "Engine.accumulate_steps": ("micro_batch_num", "deepspeed_config.gradient_accumulation_steps"),
    }
    for key, names in deepspeed.items():
        for name in names:
            if name in run and run.value(name) != "auto":
                run.put(key, run.integer(name, least=1), name)
    if not run.flag("calculate_per_token_loss", False):
        run.notes.append(
            "a step's loss is the mean over all its tokens; without --calculate-per-token-loss Megatron "
            "averages each micro batch first, which differs where loss masks leave them different numbers"
        )
    if "train_samples" in run:
        if "train_iters" in run:
            raise run.conflict(("train_iters", "train_samples"), "the length is given in one way")
        run.put(
            "Engine.max_steps",
            int(_steps(run, "train_samples", least=1)),
            "train_samples",
            "global_batch_size",
        )


def _steps(run: Translation, name: str, *, least: float = 0) -> float:
    """Convert samples to optimizer steps of ``global_batch_size``, at least ``least`` steps."""
    size = run.integer("global_batch_size", least=1)
    if size is None:
        raise run.error(
            name, "counts samples; steps follow from them with global_batch_size, which is missing"
        )
    return run.integer(name, least=math.ceil(size * least)) / size


def lengths(run: Translation) -> None:
    """Translate DeepSpeed's curriculum by length: sequences that grow."""
    if not run.flag(f"{_CURRICULUM}.enabled", False):
        return
    kind, schedule, least, most, steps, unit = names = tuple(
        f"{_CURRICULUM}.{name}"
        for name in (
            "curriculum_type",
            "schedule_type",
            "min_difficulty",
            "max_difficulty",
            "schedule_config.total_curriculum_step",
            "schedule_config.difficulty_step",
        )
    )
    if absent := [name for name in names if name not in run]:
        raise run.error(f"{_CURRICULUM}.enabled", f"needs {', '.join(absent)}")
    run.choice(kind, ("seqlen",))
    if run.value(schedule) != "fixed_linear":
        raise run.error(schedule, "must be fixed_linear: sequences grow in equal parts of the samples")
    start, end, total, increment = (run.integer(name, least=1) for name in names[2:])
    if start % increment:
        raise run.error(least, f"must be a multiple of {unit}, to which lengths are rounded there")
    if end != run.integer("seq_length"):
        raise run.error(most, "must be --seq-length, to which sequences grow here")
    if "Global.global_batch_size" not in run.native:
        raise run.error(steps, "counts steps, here samples: give --global-batch-size")
    batch = run.native["Global.global_batch_size"]
    run.put("Global.rampup_seq_len", [start, increment, total * batch.value], *names, *batch.origins)
    run.notes.append("each length begins one step later than with DeepSpeed, which counts from step 1")


def precision(run: Translation) -> None:
    """Translate the type of computation and the loss scale."""
    switches = {
        "bf16": "bfloat16",
        "fp16": "float16",
        f"{_FP16}.enabled": "float16",
        "deepspeed_config.bf16.enabled": "bfloat16",
        "deepspeed_config.bfloat16.enabled": "bfloat16",
    }
    on = {name: dtype for name, dtype in switches.items() if run.flag(name, False)}
    for name in ("compute_dtype", "params_dtype"):
        if name in run:
            dtype = _TYPES[run.choice(name, _TYPES)]
            if dtype is not None or (name == "compute_dtype" and on):
                on[name] = dtype
    kinds = set(on.values())
    if len(kinds) > 1:
        raise run.conflict(tuple(on), "a run computes in one precision; give one of these")
    dtype = kinds.pop() if kinds else None
    if dtype is not None:
        _put_type(run, dtype, tuple(on))
    if dtype is not None and run.flag("fp32_residual_connection", False):
        raise run.error(
            "fp32_residual_connection",
            "a run in 16 bits adds the branches of a block in 16 bits too; drop it, or compute in float32",
        )
    if dtype == "float16":
        _loss_scale(run)


def device(run: Translation) -> None:
    """Translate ``Global.device``, if arguments of the ports to Ascend name it."""
    target, backend = "device_target", "distributed_backend"
    kinds = {"Ascend": NPU, "GPU": GPU, "CPU": CPU}
    if target in run:
        kind = kinds[run.choice(target, kinds)]
    elif run.text(backend) == "hccl":
        kind = NPU
    else:
        return
    chosen, why = of_recipe(kind) if kind == NPU else (kind, "")
    run.put("Global.device", chosen, target, backend, why=why)


def _put_type(run: Translation, dtype: str, names: tuple[str, ...]) -> None:
    prefix, origins = "Engine.mix_precision", run.origins(*names)
    chosen = run.native.get("Global.device")
    on_cpu = expected_device("auto" if chosen is None else str(chosen.value)) == CPU
    why = "a CPU computes in float32" if on_cpu else ""
    run.put(f"{prefix}.enable", not on_cpu, *origins, why=why)
    run.put(f"{prefix}.dtype", dtype, *origins)
    run.put(f"{prefix}.level", "O2", *origins, why="16-bit weights with float32 masters")
    if on_cpu:
        run.notes.append(f"{dtype} is for accelerators: this CPU computes in float32")


def _loss_scale(run: Translation) -> None:
    prefix = "Engine.mix_precision"
    for name in ("loss_scale", f"{_FP16}.loss_scale"):
        scale = run.number(name, 0.0, least=0.0)
        if scale:
            run.put(f"{prefix}.scale_loss", scale, name)
            run.put(f"{prefix}.use_dynamic_loss_scaling", False, name, why="a constant scale")
            return
    power = run.integer(f"{_FP16}.initial_scale_power", least=0)
    if power is not None and power > 64:
        raise run.error(f"{_FP16}.initial_scale_power", "must be at most 64")
    if power is not None:
        run.put(f"{prefix}.scale_loss", 2.0**power, f"{_FP16}.initial_scale_power")
    elif "initial_loss_scale" in run:
        run.put(
            f"{prefix}.scale_loss",
            run.number("initial_loss_scale"),
            "initial_loss_scale",
        )
    else:
        run.put(f"{prefix}.scale_loss", 2.0**32, why=_DEFAULT)


def optimizer(run: Translation) -> None:
    """Translate the update rule and weight decay."""
    names = ("optimizer", "sgd_momentum")
    if run.choice("optimizer", ("adam", "sgd"), "adam") == "sgd":
        if run.number("sgd_momentum", 0.9) != 0:
            raise run.error(
                "optimizer", "has no momentum here; give --sgd-momentum 0 (Megatron's default is 0.9)"
            )
        run.put("Optimizer.name", "SGD", *names)
    elif "optimizer" in run:
        run.put("Optimizer.name", "AdamW", "optimizer")
    _weight_decay(run)


def _weight_decay(run: Translation) -> None:
    course = ("weight_decay_incr_style", "start_weight_decay", "end_weight_decay")
    style = run.choice(course[0], ("constant", "linear", "cosine"), "constant")
    start, end = (run.number(name, least=0.0) for name in course[1:])
    if style == "constant":
        if start is not None or end is not None:
            raise run.conflict(course[1:], "go with weight_decay_incr_style linear or cosine")
        run.put("Optimizer.weight_decay", run.number("weight_decay", least=0.0), "weight_decay")
        return
    if start is None or end is None:
        raise run.error(course[0], "needs start_weight_decay and end_weight_decay")
    value = {"start": start, "end": end, "style": style}
    run.put("Optimizer.weight_decay_schedule", value, *course)


def schedule(run: Translation) -> None:
    """Translate the schedule of the learning rate."""
    prefix = "Optimizer.lr"
    run.put(f"{prefix}.max_lr", run.number("lr", least=0.0), "lr")
    run.put(f"{prefix}.min_lr", run.number("min_lr", least=0.0), "min_lr")
    style = _STYLES[run.choice("lr_decay_style", _STYLES, "linear")]
    run.put(
        f"{prefix}.decay_style",
        style,
        "lr_decay_style",
        why="" if "lr_decay_style" in run else _DEFAULT,
    )
    _decay(run, style)
    _warmup(run)
    names = ("use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler")
    chosen = [name for name in names if run.flag(name, False)]
    if len(chosen) > 1:
        raise run.conflict(names, "the schedule of the checkpoint or that of the arguments holds, not both")
    for name in chosen:
        which = "checkpoint" if name == names[0] else "config"
        run.put("Engine.save_load.lr_schedule", which, name)


def _decay(run: Translation, style: str) -> None:
    prefix, names = "Optimizer.lr", ("lr_decay_iters", "lr_decay_samples")
    if all(name in run for name in names):
        raise run.conflict(names, "the length is given in one way")
    if "lr_decay_iters" in run:
        run.put(f"{prefix}.decay_steps", run.integer(names[0], least=1), names[0])
    elif "lr_decay_samples" in run:
        steps = _steps(run, names[1], least=0.5)
        origins = run.origins(names[1], "global_batch_size")
        run.put(f"{prefix}.decay_steps", round(steps), *origins)
        if steps != round(steps):
            run.notes.append(f"the rate decays in {round(steps)} steps; there in {steps:.2f}")
    if style != "wsd":
        return
    for name, key in (("lr_wsd_decay_iters", "wsd_decay_steps"), ("lr_wsd_decay_style", "wsd_decay_style")):
        run.put(f"{prefix}.{key}", run.value(name), name)


def _warmup(run: Translation) -> None:
    names = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "warmup")
    given = [name for name in names if run.number(name)]
    if len(given) > 1:
        raise run.conflict(given, "the warm-up is given in one way")
    for name in given:
        origins = run.origins(name)
        if name == "lr_warmup_iters":
            run.put("Optimizer.lr.warmup_steps", run.integer(name, least=0), *origins)
        elif name == "lr_warmup_samples":
            _warmup_samples(run, _steps(run, name), (*origins, *run.origins("global_batch_size")))
        else:
            run.put("Optimizer.lr.warmup_rate", run.number(name, least=0.0), *origins)


def _warmup_samples(run: Translation, steps: float, origins: tuple[Given, ...]) -> None:
    """Set the warm-up as whole steps, or else as a share of the decay steps."""
    if steps == int(steps):
        run.put("Optimizer.lr.warmup_steps", int(steps), *origins)
        return
    length = (run.native.get("Optimizer.lr.decay_steps") or run.native["Engine.max_steps"]).value
    if type(length) is not int or length < 1:
        return  # refused later because of its type
    run.put("Optimizer.lr.warmup_rate", steps / length, *origins, why=f"{steps:.2f} steps")


def checkpoints(run: Translation) -> None:
    """Translate where a run is saved, and the checkpoint that it starts from."""
    prefix, save, load = "Engine.save_load", run.text("save"), run.text("load")
    if save is None:
        run.notes.append("without --save a run is saved anyway, at its end, in ./output")
    else:
        run.put(f"{prefix}.output_dir", save, "save")
    interval = run.integer("save_interval", 0, least=1)
    why = "" if interval else "save_interval is not given: only at the end"
    run.put(f"{prefix}.save_steps", interval, "save_interval", why=why)
    origins = run.origins("load", "save", "finetune", "resume_training")
    same = load is not None and save is not None and _path(load) == _path(save)
    if run.flag("finetune", False):
        if load is None:
            raise run.error("finetune", "needs load, the checkpoint whose weights it starts from")
        run.put(f"{prefix}.init_from", load, *origins)
    elif same or (load is None and run.flag("resume_training", False)):
        must = run.flag("resume_training", False)
        run.put(f"{prefix}.resume", True if must else "auto", *origins)
    elif load is not None:
        run.put(f"{prefix}.ckpt_dir", load, *origins)


def _path(text: str) -> str:
    return os.path.normpath(text)


def profiler(run: Translation) -> None:
    """Translate which steps are profiled, and in how much detail."""
    names = ("profile_step_start", "profile_step_end")
    if any(name in run for name in names):
        start, end = (
            run.integer(name, default, least=0) for name, default in zip(names, (10, 12), strict=True)
        )
        run.put("Profiler.scheduler", [start, end], *names)
    elif run.flag("profile", False):
        run.put("Profiler.scheduler", [10, 12], why=_DEFAULT)
    level = run.value("profile_level")
    if level is None:
        return
    if level not in ("level0", "level1", "level2", 0, 1, 2):
        raise run.error("profile_level", "must be level0, level1 or level2")
    number = int(str(level)[-1])
    values: dict[str, Any] = {"Profiler.record_shapes": number > 0, "Profiler.detailed": number > 1}
    for key, value in values.items():
        run.put(key, value, "profile_level")
