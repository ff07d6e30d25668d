"""From the `Optimizer` section of the configuration to an optimizer and its schedule."""

from __future__ import annotations

from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.optimizer import LRConfig, OptimizerConfig
from ppfleetx.optims.adamw import NamedParams, Optimizer, adamw, sgd
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
    if cfg_optimizer.name == "SGD":
        return sgd(named_params, multi_precision=multi_precision, on_host=on_host)
    if cfg_optimizer.name != "AdamW":
        raise ConfigError("must be AdamW or SGD", key="Optimizer.name", value=cfg_optimizer.name)
    shapes = {name: _global_shape(param) for name, param in named_params}
    return adamw(
        named_params,
        decayed=lambda name: decays(name, shapes[name]),
        beta1=cfg_optimizer.beta1,
        beta2=cfg_optimizer.beta2,
        epsilon=cfg_optimizer.epsilon,
        weight_decay=cfg_optimizer.weight_decay,
        multi_precision=multi_precision,
        on_host=on_host,
    )


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
