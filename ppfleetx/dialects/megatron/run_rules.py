"""Rules of Megatron's arguments that are read together: batches, precision, schedule, checkpoints."""

from __future__ import annotations

import math
import os
from typing import Any

from ppfleetx.dialects.given import Given
from ppfleetx.dialects.reading import Reading
from ppfleetx.dialects.translate import Rule
from ppfleetx.dialects.translation import Translation
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


def defaults_rule(log: str, *, log_interval: int) -> Rule:
    """The rule for what a toolkit does where nothing is said, and this program does otherwise.

    Args:
        log: the callback that writes its log lines.
        log_interval: its steps between them.
    """

    def defaults(reading: Reading, result: Translation) -> None:
        for name, key, value in (
            ("seed", "Global.seed", 1234),
            ("log_interval", "Engine.logging_freq", log_interval),
            ("eval_interval", "Engine.eval_freq", 1000),
        ):
            if name not in reading:
                result.put(key, value, why="its default")
        result.put("Engine.callbacks", ["default", log], why="its own log lines beside ours")
        workers = reading.integer("num_workers", least=0)
        if workers is not None and "Data.Eval.dataset.input_dir" in result.native:
            result.put("Data.Eval.loader.num_workers", workers, *reading.origins("num_workers"))

    return defaults


def batches(reading: Reading, result: Translation) -> None:
    """Micro batch, global batch and steps."""
    deepspeed = {
        "Global.global_batch_size": ("global_batch_size", "deepspeed_config.train_batch_size"),
        "Global.micro_batch_size": ("micro_batch_size", "deepspeed_config.train_micro_batch_size_per_gpu"),
        "Engine.accumulate_steps": ("micro_batch_num", "deepspeed_config.gradient_accumulation_steps"),
    }
    for key, names in deepspeed.items():
        for name in names:
            if name in reading and reading.value(name) != "auto":
                result.put(key, reading.integer(name, least=1), *reading.origins(name))
    if not reading.flag("calculate_per_token_loss", False):
        result.notes.append(
            "a step's loss is the mean over all its tokens; without --calculate-per-token-loss Megatron "
            "averages each micro batch first, which differs where loss masks leave them different numbers"
        )
    if "train_samples" in reading:
        if "train_iters" in reading:
            raise reading.conflict(("train_iters", "train_samples"), "the length is given in one way")
        result.put(
            "Engine.max_steps",
            int(_steps(reading, "train_samples", least=1)),
            *reading.origins("train_samples", "global_batch_size"),
        )


def _steps(reading: Reading, name: str, *, least: float = 0) -> float:
    """Samples as optimizer steps of ``global_batch_size``, at least ``least`` of them."""
    size = reading.integer("global_batch_size", least=1)
    if size is None:
        raise reading.error(
            name, "counts samples; steps follow from them with global_batch_size, which is missing"
        )
    return reading.integer(name, least=math.ceil(size * least)) / size


def precision(reading: Reading, result: Translation) -> None:
    """The type of computation, and the loss scale."""
    switches = {
        "bf16": "bfloat16",
        "fp16": "float16",
        f"{_FP16}.enabled": "float16",
        "deepspeed_config.bf16.enabled": "bfloat16",
        "deepspeed_config.bfloat16.enabled": "bfloat16",
    }
    on = {name: dtype for name, dtype in switches.items() if reading.flag(name, False)}
    for name in ("compute_dtype", "params_dtype"):
        if name in reading:
            dtype = _TYPES[reading.choice(name, _TYPES)]
            if dtype is not None or (name == "compute_dtype" and on):
                on[name] = dtype
    kinds = set(on.values())
    if len(kinds) > 1:
        raise reading.conflict(tuple(on), "a run computes in one precision; give one of these")
    dtype = kinds.pop() if kinds else None
    if dtype is not None:
        _put_type(reading, result, dtype, tuple(on))
    if dtype is not None and reading.flag("fp32_residual_connection", False):
        raise reading.error(
            "fp32_residual_connection",
            "a run in 16 bits adds the branches of a block in 16 bits too; drop it, or compute in float32",
        )
    if dtype == "float16":
        _loss_scale(reading, result)


def device(reading: Reading, result: Translation) -> None:
    """``Global.device``, where arguments of the ports to Ascend name it."""
    target, backend = "device_target", "distributed_backend"
    kinds = {"Ascend": NPU, "GPU": GPU, "CPU": CPU}
    if target in reading:
        kind = kinds[reading.choice(target, kinds)]
    elif reading.text(backend) == "hccl":
        kind = NPU
    else:
        return
    chosen, why = of_recipe(kind) if kind == NPU else (kind, "")
    result.put("Global.device", chosen, *reading.origins(target, backend), why=why)


def _put_type(reading: Reading, result: Translation, dtype: str, names: tuple[str, ...]) -> None:
    prefix, origins = "Engine.mix_precision", reading.origins(*names)
    chosen = result.native.get("Global.device")
    on_cpu = expected_device("auto" if chosen is None else str(chosen.value)) == CPU
    why = "a CPU computes in float32" if on_cpu else ""
    result.put(f"{prefix}.enable", not on_cpu, *origins, why=why)
    result.put(f"{prefix}.dtype", dtype, *origins)
    result.put(f"{prefix}.level", "O2", *origins, why="16-bit weights with float32 masters")
    if on_cpu:
        result.notes.append(f"{dtype} is for accelerators: this CPU computes in float32")


def _loss_scale(reading: Reading, result: Translation) -> None:
    prefix = "Engine.mix_precision"
    for name in ("loss_scale", f"{_FP16}.loss_scale"):
        scale = reading.number(name, 0.0, least=0.0)
        if scale:
            result.put(f"{prefix}.scale_loss", scale, *reading.origins(name))
            result.put(
                f"{prefix}.use_dynamic_loss_scaling", False, *reading.origins(name), why="a constant scale"
            )
            return
    power = reading.integer(f"{_FP16}.initial_scale_power", least=0)
    if power is not None and power > 64:
        raise reading.error(f"{_FP16}.initial_scale_power", "must be at most 64")
    if power is not None:
        result.put(f"{prefix}.scale_loss", 2.0**power, *reading.origins(f"{_FP16}.initial_scale_power"))
    elif "initial_loss_scale" in reading:
        result.put(
            f"{prefix}.scale_loss",
            reading.number("initial_loss_scale"),
            *reading.origins("initial_loss_scale"),
        )
    else:
        result.put(f"{prefix}.scale_loss", 2.0**32, why=_DEFAULT)


def optimizer(reading: Reading, result: Translation) -> None:
    """Update rule and weight decay."""
    names = ("optimizer", "sgd_momentum")
    if reading.choice("optimizer", ("adam", "sgd"), "adam") == "sgd":
        if reading.number("sgd_momentum", 0.9) != 0:
            raise reading.error(
                "optimizer", "has no momentum here; give --sgd-momentum 0 (Megatron's default is 0.9)"
            )
        result.put("Optimizer.name", "SGD", *reading.origins(*names))
    elif "optimizer" in reading:
        result.put("Optimizer.name", "AdamW", *reading.origins("optimizer"))
    _weight_decay(reading, result)


def _weight_decay(reading: Reading, result: Translation) -> None:
    course = ("weight_decay_incr_style", "start_weight_decay", "end_weight_decay")
    style = reading.choice(course[0], ("constant", "linear", "cosine"), "constant")
    start, end = (reading.number(name, least=0.0) for name in course[1:])
    if style == "constant":
        if start is not None or end is not None:
            raise reading.conflict(course[1:], "go with weight_decay_incr_style linear or cosine")
        if "weight_decay" in reading:
            result.put(
                "Optimizer.weight_decay",
                reading.number("weight_decay", least=0.0),
                *reading.origins("weight_decay"),
            )
        return
    if start is None or end is None:
        raise reading.error(course[0], "needs start_weight_decay and end_weight_decay")
    value = {"start": start, "end": end, "style": style}
    result.put("Optimizer.weight_decay_schedule", value, *reading.origins(*course))


def schedule(reading: Reading, result: Translation) -> None:
    """The learning rate."""
    prefix = "Optimizer.lr"
    result.put(f"{prefix}.max_lr", reading.number("lr", least=0.0), *reading.origins("lr"))
    if "min_lr" in reading:
        result.put(f"{prefix}.min_lr", reading.number("min_lr", least=0.0), *reading.origins("min_lr"))
    style = _STYLES[reading.choice("lr_decay_style", _STYLES, "linear")]
    result.put(
        f"{prefix}.decay_style",
        style,
        *reading.origins("lr_decay_style"),
        why="" if "lr_decay_style" in reading else _DEFAULT,
    )
    _decay(reading, result, style)
    _warmup(reading, result)
    names = ("use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler")
    chosen = [name for name in names if reading.flag(name, False)]
    if len(chosen) > 1:
        raise reading.conflict(
            names, "the schedule of the checkpoint or that of the arguments holds, not both"
        )
    for name in chosen:
        which = "checkpoint" if name == names[0] else "config"
        result.put("Engine.save_load.lr_schedule", which, *reading.origins(name))


def _decay(reading: Reading, result: Translation, style: str) -> None:
    prefix, names = "Optimizer.lr", ("lr_decay_iters", "lr_decay_samples")
    if all(name in reading for name in names):
        raise reading.conflict(names, "the length is given in one way")
    if "lr_decay_iters" in reading:
        result.put(f"{prefix}.decay_steps", reading.integer(names[0], least=1), *reading.origins(names[0]))
    elif "lr_decay_samples" in reading:
        steps = _steps(reading, names[1], least=0.5)
        origins = reading.origins(names[1], "global_batch_size")
        result.put(f"{prefix}.decay_steps", round(steps), *origins)
        if steps != round(steps):
            result.notes.append(f"the rate decays in {round(steps)} steps; there in {steps:.2f}")
    if style != "wsd":
        return
    for name, key in (("lr_wsd_decay_iters", "wsd_decay_steps"), ("lr_wsd_decay_style", "wsd_decay_style")):
        if name in reading:
            result.put(f"{prefix}.{key}", reading.value(name), *reading.origins(name))


def _warmup(reading: Reading, result: Translation) -> None:
    names = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "warmup")
    given = [name for name in names if reading.number(name)]
    if len(given) > 1:
        raise reading.conflict(given, "the warm-up is given in one way")
    for name in given:
        origins = reading.origins(name)
        if name == "lr_warmup_iters":
            result.put("Optimizer.lr.warmup_steps", reading.integer(name, least=0), *origins)
        elif name == "lr_warmup_samples":
            _warmup_samples(result, _steps(reading, name), (*origins, *reading.origins("global_batch_size")))
        else:
            result.put("Optimizer.lr.warmup_rate", reading.number(name, least=0.0), *origins)


def _warmup_samples(result: Translation, steps: float, origins: tuple[Given, ...]) -> None:
    """Whole steps, or what they are of the steps of the decay."""
    if steps == int(steps):
        result.put("Optimizer.lr.warmup_steps", int(steps), *origins)
        return
    length = (result.native.get("Optimizer.lr.decay_steps") or result.native["Engine.max_steps"]).value
    if type(length) is not int or length < 1:
        return  # refused by its type
    result.put("Optimizer.lr.warmup_rate", steps / length, *origins, why=f"{steps:.2f} steps")


def checkpoints(reading: Reading, result: Translation) -> None:
    """Where a run is saved, and what it starts from."""
    prefix, save, load = "Engine.save_load", reading.text("save"), reading.text("load")
    if save is None:
        result.notes.append("without --save a run is saved anyway, at its end, in ./output")
    else:
        result.put(f"{prefix}.output_dir", save, *reading.origins("save"))
    if "save_interval" in reading:
        result.put(
            f"{prefix}.save_steps",
            reading.integer("save_interval", least=1),
            *reading.origins("save_interval"),
        )
    else:
        result.put(f"{prefix}.save_steps", 0, why="save_interval is not given: only at the end")
    origins = reading.origins("load", "save", "finetune", "resume_training")
    same = load is not None and save is not None and _path(load) == _path(save)
    if reading.flag("finetune", False):
        if load is None:
            raise reading.error("finetune", "needs load, the checkpoint whose weights it starts from")
        result.put(f"{prefix}.init_from", load, *origins)
    elif same or (load is None and reading.flag("resume_training", False)):
        must = reading.flag("resume_training", False)
        result.put(f"{prefix}.resume", True if must else "auto", *origins)
    elif load is not None:
        result.put(f"{prefix}.ckpt_dir", load, *origins)


def _path(text: str) -> str:
    return os.path.normpath(text)


def profiler(reading: Reading, result: Translation) -> None:
    """Which steps are profiled, and how much of them."""
    names = ("profile_step_start", "profile_step_end")
    if any(name in reading for name in names):
        start, end = (
            reading.integer(name, default, least=0) for name, default in zip(names, (10, 12), strict=True)
        )
        result.put("Profiler.scheduler", [start, end], *reading.origins(*names))
    elif reading.flag("profile", False):
        result.put("Profiler.scheduler", [10, 12], why=_DEFAULT)
    level = reading.value("profile_level")
    if level is None:
        return
    if level not in ("level0", "level1", "level2", 0, 1, 2):
        raise reading.error("profile_level", "must be level0, level1 or level2")
    number = int(str(level)[-1])
    values: dict[str, Any] = {"Profiler.record_shapes": number > 0, "Profiler.detailed": number > 1}
    for key, value in values.items():
        result.put(key, value, *reading.origins("profile_level"))
