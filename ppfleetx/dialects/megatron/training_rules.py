"""Translation rules for Megatron arguments that depend on each other: batches, precision, optimizer,
schedule, checkpoints, logs and others."""

from __future__ import annotations

import math
import os

from ppfleetx.config.batch_sizes import BatchPlan, Ramp
from ppfleetx.dialects.translation import Translation
from ppfleetx.dialects.user_options import UserOption
from ppfleetx.utils.device_support import CPU, GPU, NPU, device_for_recipe, expected_device

_TYPES = {
    "float32": None,
    "fp32": None,
    "float16": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
_RAMP = "rampup_batch_size"
_FP16 = "deepspeed_config.fp16"
_CURRICULUM = "deepspeed_config.curriculum_learning"


def logs(run: Translation, *, callback: str, interval: int) -> None:
    """Translate the logging interval, and add ``callback``, which logs in the format of the user's toolkit.
    Also use ``num_workers`` for the evaluation data; the key table uses it for the training data.

    Args:
        callback: the name of the callback in ``Engine.callbacks``.
        interval: the toolkit's default logging interval in steps.
    """
    run.put("Engine.logging_freq", run.value("log_interval", interval), "log_interval")
    run.put("Engine.callbacks", ["default", callback], why="its own log lines beside ours")
    workers = run.integer("num_workers", least=0)
    if workers is not None and "Data.Eval.dataset.input_dir" in run.native:
        run.put("Data.Eval.loader.num_workers", workers, "num_workers")


def batches(run: Translation) -> None:
    """Translate ``train_samples``, the length of the run in samples, to steps. Without
    ``calculate_per_token_loss``, add a note that Megatron and ppfleetx average the loss of a step
    differently."""
    if not run.flag("calculate_per_token_loss", False):
        run.notes.append(
            "a step's loss is the mean over all its tokens; without --calculate-per-token-loss Megatron "
            "averages each micro batch first, which differs where loss masks leave them different numbers"
        )
    if "train_samples" in run:
        if "train_iters" in run:
            raise run.conflict(("train_iters", "train_samples"), "the length is given in one way")
        steps = int(_steps(run, "train_samples", least=1))
        if _RAMP in run:
            steps = _ramp(run).steps_in(run.integer("train_samples"))
        run.put("Engine.max_steps", steps, "train_samples", "global_batch_size", _RAMP)
    elif _RAMP in run:
        raise run.error(_RAMP, "counts samples, so the length of the run must too: give --train-samples")


def _ramp(run: Translation) -> BatchPlan:
    """Translate ``rampup_batch_size``, and return the batch sizes of the run. Whether the ranks and micro
    batches divide these sizes is checked later, by the configuration loader."""
    numbers, size = run.value(_RAMP), run.integer("global_batch_size")
    if (
        not isinstance(numbers, list)
        or len(numbers) != 3
        or any(type(n) is not int or n < 1 for n in numbers)
    ):
        raise run.error(_RAMP, "must be three numbers of at least 1: start, increment, samples")
    run.put("Global.rampup_batch_size", numbers, _RAMP)
    return BatchPlan(size, size, size, 1, Ramp(*numbers, full=size))


def _steps(run: Translation, name: str, *, least: float = 0) -> float:
    """Return the value of the option ``name``, converted from samples to steps. Raises ConfigError if the
    value is below ``least`` steps, or if there is no ``global_batch_size``."""
    size = run.integer("global_batch_size", least=1)
    if size is None:
        raise run.error(
            name, "counts samples; steps follow from them with global_batch_size, which is missing"
        )
    return run.integer(name, least=math.ceil(size * least)) / size


def lengths(run: Translation) -> None:
    """Translate DeepSpeed's curriculum learning, in which sequences become longer during training."""
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
    """Translate Megatron's and DeepSpeed's arguments for the compute type and the loss scale."""
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
    """Set ``Global.device`` if ``device_target`` or ``distributed_backend`` names the device. These options
    exist in Megatron's ports to Ascend NPUs."""
    target, backend = "device_target", "distributed_backend"
    kinds = {"Ascend": NPU, "GPU": GPU, "CPU": CPU}
    if target in run:
        kind = kinds[run.choice(target, kinds)]
    elif run.text(backend) == "hccl":
        kind = NPU
    else:
        return
    chosen, why = device_for_recipe(kind) if kind == NPU else (kind, "")
    run.put("Global.device", chosen, target, backend, why=why)


def _put_type(run: Translation, dtype: str, names: tuple[str, ...]) -> None:
    chosen = run.native.get("Global.device")
    on_cpu = expected_device("auto" if chosen is None else str(chosen.value)) == CPU
    run.put_precision(dtype, *names, on_cpu=on_cpu)
    run.put("Engine.mix_precision.level", "O2", *names, why="16-bit weights with float32 masters")


def _loss_scale(run: Translation) -> None:
    prefix = "Engine.mix_precision"
    for name in ("loss_scale", f"{_FP16}.loss_scale"):
        scale = run.number(name, 0.0, least=0.0)
        if scale:
            run.put(f"{prefix}.scale_loss", scale, name)
            run.put(f"{prefix}.use_dynamic_loss_scaling", False, name, why="a constant scale")
            return
    name = f"{_FP16}.initial_scale_power"
    if name in run:
        power = run.integer(name, least=0)
        if power > 64:
            raise run.error(name, "must be at most 64")
        run.put(f"{prefix}.scale_loss", 2.0**power, name)
    else:
        scale = run.number("initial_loss_scale", 2.0**32)
        run.put(f"{prefix}.scale_loss", scale, "initial_loss_scale")


def optimizer(run: Translation) -> None:
    """Translate Megatron's options for the optimizer and its weight decay."""
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
    """Translate the options of Megatron's learning-rate schedule that depend on each other."""
    if run.native["Optimizer.lr.decay_style"].value == "wsd":
        run.put("Optimizer.lr.wsd_decay_style", run.value("lr_wsd_decay_style"), "lr_wsd_decay_style")
    if _RAMP in run:
        _in_samples(run)
    else:
        _in_steps(run)


def _in_samples(run: Translation) -> None:
    """Translate the learning-rate schedule of a run whose batch size grows. The lengths of the schedule stay
    in samples."""
    prefix = "Optimizer.lr"
    for name in ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"):
        if run.value(name):
            rule = f"counts steps, of different sizes here: give --{name.replace('_', '-')[:-5]}samples"
            raise run.conflict((name, _RAMP), rule)
    run.put(f"{prefix}.unit", "sample", _RAMP)
    decay = run.first("lr_decay_samples", "train_samples")
    run.put(f"{prefix}.decay_steps", run.integer(decay, least=1), decay)
    warmup = run.integer("lr_warmup_samples", least=0)
    run.put(f"{prefix}.warmup_steps", warmup or None, "lr_warmup_samples")
    if run.native[f"{prefix}.decay_style"].value == "wsd":
        wsd = "lr_wsd_decay_samples"
        run.put(f"{prefix}.wsd_decay_steps", run.integer(wsd, least=1), wsd)


def _in_steps(run: Translation) -> None:
    prefix = "Optimizer.lr"
    lengths = {"lr_decay_samples": "decay_steps"}
    if run.native[f"{prefix}.decay_style"].value == "wsd":
        run.put(f"{prefix}.wsd_decay_steps", run.value("lr_wsd_decay_iters"), "lr_wsd_decay_iters")
        lengths["lr_wsd_decay_samples"] = "wsd_decay_steps"
    for name, key in lengths.items():
        if name not in run:
            continue
        steps = _steps(run, name, least=0.5)
        run.put(f"{prefix}.{key}", round(steps), name, "global_batch_size")
        if steps != round(steps):
            run.notes.append(f"{name} are {round(steps)} steps here; there {steps:.2f}")
    if "lr_warmup_samples" in run and (steps := _steps(run, "lr_warmup_samples")):
        _warmup_samples(run, steps, run.origins("lr_warmup_samples", "global_batch_size"))


def _warmup_samples(run: Translation, steps: float, origins: tuple[UserOption, ...]) -> None:
    if steps == int(steps):
        run.put("Optimizer.lr.warmup_steps", int(steps), *origins)
        return
    length = (run.native.get("Optimizer.lr.decay_steps") or run.native["Engine.max_steps"]).value
    if type(length) is not int or length < 1:
        return  # the configuration loader reports a wrong type later
    run.put("Optimizer.lr.warmup_rate", steps / length, *origins, why=f"{steps:.2f} steps")


def checkpoints(run: Translation) -> None:
    """Translate Megatron's options for checkpoints: where and when to save them, and which checkpoint to
    start from."""
    prefix, save, load = "Engine.save_load", run.text("save"), run.text("load")
    if save is None:
        run.notes.append("without --save a run is saved anyway, at its end, in ./output")
    else:
        run.put(f"{prefix}.output_dir", save, "save")
    interval = run.integer("save_interval", 0, least=1)
    why = "" if interval else "save_interval is not given: only at the end"
    run.put(f"{prefix}.save_steps", interval, "save_interval", why=why)
    origins = run.origins("load", "save", "finetune", "resume_training")
    same = load is not None and save is not None and os.path.normpath(load) == os.path.normpath(save)
    if run.flag("finetune", False):
        if load is None:
            raise run.error("finetune", "needs load, the checkpoint whose weights it starts from")
        run.put(f"{prefix}.init_from", load, *origins)
    elif same or (load is None and run.flag("resume_training", False)):
        must = run.flag("resume_training", False)
        run.put(f"{prefix}.resume", True if must else "auto", *origins)
    elif load is not None:
        run.put(f"{prefix}.ckpt_dir", load, *origins)


def profiler(run: Translation) -> None:
    """Translate the options that say which steps the profiler records."""
    names = ("profile_step_start", "profile_step_end")
    if run.flag("profile", False) or any(name in run for name in names):
        steps = [run.integer(name, default, least=0) for name, default in zip(names, (10, 12), strict=True)]
        run.put("Profiler.scheduler", steps, *names)
