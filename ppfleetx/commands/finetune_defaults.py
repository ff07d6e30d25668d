"""Settings that ``ppfleetx finetune`` uses by default, and settings that ``--max-steps`` changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppfleetx.checkpoint.manifest import parse_step_directory
from ppfleetx.checkpoint.resolve_checkpoint import newest_complete, resolve_checkpoint
from ppfleetx.checkpoint.run_ownership import read_run
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.loader import ConfigSource, read_config
from ppfleetx.config.reading.overrides import Override, Setting, overridden_keys
from ppfleetx.utils.launcher_env import rank
from ppfleetx.utils.log import configure_logging, get_logger

EPOCHS = 3
BATCH = 8
"""Sequences per step on each data-parallel rank, rounded up to a multiple of the micro batch size."""
FULL_RATE, ADAPTER_RATE = 5e-5, 5e-4
_BATCH_KEYS = (
    *(f"Global.{name}_batch_size" for name in ("global", "local", "micro")),
    "Engine.accumulate_steps",
)
_LR = "Optimizer.lr"
_LR_DEFAULTS = {
    "name": None,
    "decay_style": "linear",
    "min_lr": 0.0,
    "unit": "step",
    "decay_steps": None,
    "warmup_steps": None,
    "warmup_rate": 0.03,
    "wsd_decay_steps": None,
}


def finetuning_defaults(config: ConfigSource, given: Sequence[Override]) -> list[Setting]:
    """Return the default settings of finetuning, such as run length, batch size and learning rate. They
    replace values in ``config``. Keys that the user has set in the overrides ``given`` are left out."""
    cfg = read_config(config, given)[0]
    named = overridden_keys(given)

    def is_given(*keys: str) -> bool:
        return any(key == name or key.startswith(f"{name}.") for key in keys for name in named)

    values: dict[str, Any] = {}
    if not is_given("Engine.max_steps", "Engine.run_mode"):
        values["Engine.run_mode"] = "epoch"
        if not is_given("Engine.num_train_epochs"):
            values["Engine.num_train_epochs"] = EPOCHS
        if cfg.Data.Eval is not None and not is_given("Engine.eval_freq"):
            values["Engine.eval_freq"] = 1
    if not is_given("Engine.logging_freq"):
        lines = 10 if not is_given("Engine.max_steps") else cfg.Engine.max_steps // 10
        values["Engine.logging_freq"] = next((steps for steps in (10, 5, 2) if steps <= lines), 1)
    if not is_given(*_BATCH_KEYS):
        micro = cfg.Global.micro_batch_size or 1
        values |= {"Global.micro_batch_size": micro, "Global.local_batch_size": -(-BATCH // micro) * micro}
    if _LR not in named:
        course = {**_LR_DEFAULTS, "max_lr": FULL_RATE if cfg.Model.lora is None else ADAPTER_RATE}
        if is_given(f"{_LR}.warmup_steps"):
            del course["warmup_rate"]
        if is_given(f"{_LR}.name"):
            del course["decay_style"]
        values |= {f"{_LR}.{name}": value for name, value in course.items() if not is_given(f"{_LR}.{name}")}
    return [Setting(key, value, "the defaults of finetuning") for key, value in values.items()]


def without_own_base(config: ConfigSource, given: Sequence[Override]) -> list[Override]:
    """Return the overrides ``given`` without ``Engine.save_load.init_from``, if that is the checkpoint that
    ``Model.lora.base`` names as well. Such a run reads the frozen weights from its base, begins with new
    adapters, and saves the adapters alone."""
    cfg = read_config(config, given)[0]
    base, start = None if cfg.Model.lora is None else cfg.Model.lora.base, cfg.Engine.save_load.init_from
    if base is None or start is None:
        return [*given]
    try:
        is_base = resolve_checkpoint(base, verify=False).samefile(start)
    except CheckpointError:  # the run says what is wrong with the base
        is_base = False
    key = "Engine.save_load.init_from"
    return [one for one in given if not (is_base and isinstance(one, Setting) and one.key == key)]


def up_to(max_steps: int, config: ConfigSource, given: Sequence[Override]) -> list[Setting]:
    """Return the settings for a run up to step ``max_steps``. If the output directory holds a run, the
    settings continue that run from its newest checkpoint, unless ``overwrite`` or ``ckpt_dir`` is set."""
    cfg = read_config(config, given)[0]
    options, output_dir = cfg.Engine.save_load, Path(cfg.Engine.save_load.output_dir)
    values: dict[str, Any] = {"Engine.max_steps": max_steps}
    key = "Engine.num_train_epochs"
    if cfg.Engine.run_mode == "epoch" and key not in overridden_keys(given):
        values[key] = max(max_steps, cfg.Engine.num_train_epochs)  # an epoch has at least one step
    newest = None if read_run(output_dir) is None else newest_complete(output_dir)
    if newest is not None and not options.overwrite and options.ckpt_dir is None:
        if parse_step_directory(newest.name)[1] < max_steps:
            configure_logging(quiet=rank() != 0)
            get_logger().info(
                f"the run in {output_dir} continues from {newest.name} to step {max_steps}; its learning "
                f"rate follows the configuration's schedule for {max_steps} steps"
            )
        if not options.resume:
            values["Engine.save_load.resume"] = "auto"
        if options.lr_schedule == "strict":
            values["Engine.save_load.lr_schedule"] = "config"
    return [Setting(key, value, "--max-steps") for key, value in values.items()]
