"""From the `Optimizer` section of the configuration to an optimizer and its schedule."""

from __future__ import annotations

from functools import partial
from typing import Any

from ppfleetx.config.registries import OPTIMIZERS
from ppfleetx.config.sections.optimizer import LRConfig, OptimizerConfig
from ppfleetx.optims.adamw import NamedParams, Optimizer, UpdatePlace
from ppfleetx.optims.groups import decays
from ppfleetx.optims.schedules import Schedule


def build_optimizer(
    cfg_optimizer: OptimizerConfig,
    named_params: NamedParams,
    *,
    multi_precision: bool = False,
    on_host: bool = False,
) -> Optimizer:
    """Optimizer of section `Optimizer` over (canonical name, parameter) pairs.

    Args:
        cfg_optimizer: the section.
        named_params: parameters; frozen ones (`stop_gradient`) are left out.
        multi_precision: keep float32 master weights of 16-bit parameters (GPU).
        on_host: keep all state in host memory and update there.

    Raises:
        ConfigError: the optimizer is not known.
    """
    build = OPTIMIZERS.load(cfg_optimizer.name)
    if isinstance(build, type):
        from ppfleetx.optims.rule import optimizer_of_rule

        build = partial(optimizer_of_rule, build)
    shapes = {name: _global_shape(param) for name, param in named_params}
    place = UpdatePlace(lambda name: decays(name, shapes[name]), multi_precision, on_host)
    return build(named_params, cfg_optimizer, place)


def build_schedule(cfg_optimizer: OptimizerConfig, max_steps: int) -> Schedule:
    """Schedule of section `Optimizer`, in optimizer steps.

    `max_steps` stands in for a decay length that is null, and ends the ramp of the weight decay.
    Raises ConfigError when the lengths do not fit together.
    """
    lr = cfg_optimizer.lr
    decay_steps = lr.decay_steps or max_steps
    return Schedule(
        max_lr=lr.max_lr,
        min_lr=lr.min_lr,
        warmup_steps=_warmup_steps(lr, decay_steps),
        decay_steps=decay_steps,
        decay_style=lr.decay_style,
        wsd_decay_steps=_wsd_decay_steps(lr, decay_steps),
        wsd_decay_style=lr.wsd_decay_style,
        **_weight_decay(cfg_optimizer, max_steps),
    )


def _warmup_steps(lr: LRConfig, decay_steps: int) -> int:
    if lr.warmup_steps is not None:
        return lr.warmup_steps
    return round((lr.warmup_rate or 0.0) * decay_steps)


def _wsd_decay_steps(lr: LRConfig, decay_steps: int) -> int | None:
    if lr.decay_style != "wsd":
        return None
    return lr.wsd_decay_steps or max(1, decay_steps // 10)


def _weight_decay(cfg_optimizer: OptimizerConfig, max_steps: int) -> dict[str, Any]:
    ramp = cfg_optimizer.weight_decay_schedule
    if ramp is None:
        constant = cfg_optimizer.weight_decay
        return {"start_weight_decay": constant, "end_weight_decay": constant}
    return {
        "start_weight_decay": ramp.start,
        "end_weight_decay": ramp.end,
        "weight_decay_style": ramp.style,
        "weight_decay_steps": max_steps,
    }


def _global_shape(param: Any) -> list[int]:
    info = getattr(param, "info", None)
    return list(param.shape if info is None else info.global_shape)
