"""From the `Optimizer` section of the configuration to an optimizer and its schedule."""

from __future__ import annotations

from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.optims.adamw import NamedOptimizer, NamedParams, adamw, sgd
from ppfleetx.optims.groups import decays
from ppfleetx.optims.schedules import DECAY_STYLES, Schedule

# FleetX's names of schedules, and ours for the same.
_SCHEDULE_NAMES = {
    "CosineAnnealingWithWarmupDecay": "cosine",
    "LinearDecayWithWarmup": "linear",
    "ConstantLR": "constant",
}
_ADAMW_NAMES = ("AdamW", "FusedAdamW")
_SGD_NAMES = ("SGD",)


def build_optimizer(
    cfg_optimizer: Any, named_params: NamedParams, *, multi_precision: bool = False
) -> NamedOptimizer:
    """Optimizer of section `Optimizer` over (canonical name, parameter) pairs.

    Reads `name`, `weight_decay`, `beta1`, `beta2`, `epsilon`. Each parameter's global shape is taken
    from its `info` when it has one. Raises ConfigError for a name that is not known.
    """
    name = cfg_optimizer.name
    if name in _SGD_NAMES:
        return sgd(named_params, multi_precision=multi_precision)
    if name not in _ADAMW_NAMES:
        known = ", ".join(_ADAMW_NAMES + _SGD_NAMES)
        raise ConfigError(f"unknown optimizer; known are {known}", key="Optimizer.name", value=name)
    shapes = {canonical: _global_shape(param) for canonical, param in named_params}
    return adamw(
        named_params,
        decayed=lambda canonical: decays(canonical, shapes[canonical]),
        beta1=cfg_optimizer.beta1,
        beta2=cfg_optimizer.beta2,
        epsilon=cfg_optimizer.epsilon,
        weight_decay=cfg_optimizer.weight_decay,
        multi_precision=multi_precision,
    )


def build_schedule(cfg_optimizer: Any, max_steps: int) -> Schedule:
    """Schedule of section `Optimizer`, in steps; decay and ramp lengths default to `max_steps`.

    Reads from `lr`: `decay_style` (or FleetX's `name`), `max_lr`, `min_lr`, `init_lr`, `warmup_steps`
    or `warmup_rate` (fraction of `decay_steps`), `decay_steps`, `wsd_decay_steps`, `wsd_decay_style`;
    and `weight_decay`, `weight_decay_schedule` (`start`, `end`, `style`, `steps`).
    """
    lr = cfg_optimizer.lr
    decay_steps = _option(lr, "decay_steps", None) or max_steps
    max_lr = lr.max_lr
    return Schedule(
        max_lr=max_lr,
        min_lr=_option(lr, "min_lr", 0.0),
        init_lr=_option(lr, "init_lr", 0.0),
        warmup_steps=_warmup_steps(lr, decay_steps),
        decay_steps=decay_steps,
        decay_style=_decay_style(lr),
        wsd_decay_steps=_option(lr, "wsd_decay_steps", None),
        wsd_decay_style=_option(lr, "wsd_decay_style", "exponential"),
        **_weight_decay(cfg_optimizer, max_steps),
    )


def _decay_style(lr: Any) -> str:
    style = _option(lr, "decay_style", None)
    if style is not None:
        return style
    name = _option(lr, "name", "cosine")
    if name not in _SCHEDULE_NAMES and name not in DECAY_STYLES:
        known = ", ".join((*_SCHEDULE_NAMES, *DECAY_STYLES))
        raise ConfigError(f"unknown schedule; known are {known}", key="Optimizer.lr.name", value=name)
    return _SCHEDULE_NAMES.get(name, name)


def _warmup_steps(lr: Any, decay_steps: int) -> float:
    steps, rate = _option(lr, "warmup_steps", None), _option(lr, "warmup_rate", None)
    if steps is not None and rate:
        rule = f"give warmup_steps or warmup_rate ({rate:g}), not both"
        raise ConfigError(rule, key="Optimizer.lr.warmup_steps", value=steps)
    return float(steps if steps is not None else (rate or 0.0) * decay_steps)


def _weight_decay(cfg_optimizer: Any, max_steps: int) -> dict[str, Any]:
    ramp = _option(cfg_optimizer, "weight_decay_schedule", None)
    constant = cfg_optimizer.weight_decay
    return {
        "start_weight_decay": _option(ramp, "start", constant),
        "end_weight_decay": _option(ramp, "end", constant),
        "weight_decay_style": _option(ramp, "style", "constant"),
        "weight_decay_steps": _option(ramp, "steps", max_steps),
    }


def _option(section: Any, key: str, default: Any) -> Any:
    """Value of an optional key: absent and null both mean the default."""
    value = getattr(section, key, None)
    return default if value is None else value


def _global_shape(param: Any) -> list[int]:
    info = getattr(param, "info", None)
    return list(param.shape if info is None else info.global_shape)
