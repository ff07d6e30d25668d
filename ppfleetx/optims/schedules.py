"""Learning-rate and weight-decay schedules: pure functions of a position n. The position of an optimizer step
is its number, counted from 1. In a schedule by samples, it is the number of training samples up to the end of
the step. The formulas are from Megatron's parameter scheduler.

Between the warm-up and ``decay_steps``, a decay function ``(n, schedule) -> rate`` gives the learning rate.
After ``decay_steps``, the rate is ``min_lr``. A decay function that is registered with
``ScheduleTraits(decays=False)`` gives the rate after ``decay_steps``, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any

from ppfleetx.config.errors import CheckpointError, ConfigError, shown
from ppfleetx.config.message_text import counted
from ppfleetx.config.registries import SCHEDULES
from ppfleetx.config.sections.optimizer import OptimizerConfig
from ppfleetx.utils.log import get_logger


@dataclass(frozen=True)
class Schedule:
    """All settings that determine the learning rate and weight decay of each step. Checkpoints store them.

    After ``decay_steps``, the learning rate stays at ``min_lr``, unless ``decay_style`` is registered with
    ``decays=False``. ``unit`` is the unit of all lengths: ``step`` or ``sample``.

    Raises:
        ConfigError: ``warmup_steps`` is greater than ``decay_steps``. For ``wsd``, also raised if
            ``wsd_decay_steps`` is not between 1 and ``decay_steps - warmup_steps``.
    """

    max_lr: float
    min_lr: float = 0.0
    # can be fractional, because it can be configured as a fraction of decay_steps
    warmup_steps: float = 0.0
    decay_steps: int = 1
    decay_style: str = "cosine"
    wsd_decay_steps: int | None = None
    wsd_decay_style: str = "exponential"
    start_weight_decay: float = 0.01
    end_weight_decay: float = 0.01
    weight_decay_style: str = "constant"
    weight_decay_steps: int = 1
    unit: str = "step"

    def __post_init__(self) -> None:
        if not SCHEDULES.traits(self.decay_style).decays:  # this raises for an unknown style
            return
        if self.warmup_steps > self.decay_steps:
            rule = f"must not exceed decay_steps ({self.decay_steps})"
            raise ConfigError(rule, key="Optimizer.lr.warmup_steps", value=self.warmup_steps)
        if self.decay_style != "wsd":
            return
        longest = self.decay_steps - self.warmup_steps
        if self.wsd_decay_steps is None or not 1 <= self.wsd_decay_steps <= longest:
            rule = f"must be between 1 and decay_steps - warm-up ({longest:g})"
            raise ConfigError(rule, key="Optimizer.lr.wsd_decay_steps", value=self.wsd_decay_steps)

    def position(self, *, steps: int, samples: int) -> int:
        """Return the position in the schedule after ``steps`` optimizer steps on ``samples`` training samples
        in total. It is one of these two numbers, depending on ``unit``."""
        return samples if self.unit == "sample" else steps

    def lr(self, position: int) -> float:
        """Return the learning rate at ``position``, which counts from 1. Raises ConfigError if the learning
        rate is negative or not finite."""
        if position <= self.warmup_steps:
            return self.max_lr * position / self.warmup_steps
        if position > self.decay_steps and SCHEDULES.traits(self.decay_style).decays:
            return self.min_lr
        return self._own_rate(position)

    def _own_rate(self, position: int) -> float:
        rate = SCHEDULES.make(self.decay_style, position, self)
        if isinstance(rate, Real) and math.isfinite(rate) and rate >= 0:
            return float(rate)  # a NumPy number of a plugin, for one, is not JSON
        rule = f"must return a finite number, 0 or more, as the learning rate of {self.unit} {position}"
        raise ConfigError(f"{rule}; it returns {shown(rate)}", key=SCHEDULES.key, value=self.decay_style)

    def weight_decay(self, position: int) -> float:
        """Return the weight decay at ``position``, which counts from 1. It is constant, or a linear or
        cosine ramp that ends at ``weight_decay_steps``."""
        if self.weight_decay_style == "constant":
            return self.end_weight_decay
        ratio = min(position / self.weight_decay_steps, 1.0)
        if self.weight_decay_style == "cosine":
            ratio = 0.5 * (1.0 + math.cos(math.pi * (1.0 - ratio)))
        return self.start_weight_decay + (self.end_weight_decay - self.start_weight_decay) * ratio

    def describe(self) -> str:
        text = f"{self.decay_style} learning rate, peak {self.max_lr:g}"
        if SCHEDULES.traits(self.decay_style).decays:
            text += f", floor {self.min_lr:g} at {self.unit} {self.decay_steps}"
        if self.warmup_steps:
            text += f", warm-up {counted(self.warmup_steps, self.unit, 'g')} from 0"
        if self.decay_style == "wsd":
            text += f", {self.wsd_decay_style} decay over the last {self.wsd_decay_steps}"
        text += f"; weight decay {self.end_weight_decay:g}"
        if self.weight_decay_style != "constant":
            text += f" ({self.weight_decay_style} from {self.start_weight_decay:g}"
            text += f" over {counted(self.weight_decay_steps, self.unit)})"
        return text

    def state(self) -> dict[str, Any]:
        """Return the schedule as JSON values, for a checkpoint. :meth:`from_state` rebuilds the schedule."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Schedule:
        """Build the schedule from ``state``, a result of :meth:`state`. Raises CheckpointError if this
        version cannot read ``state``."""
        unreadable = CheckpointError(
            "this version cannot read the learning-rate schedule in the checkpoint; "
            "set Engine.save_load.lr_schedule to config to use the configured one"
        )
        if not isinstance(state, Mapping) or set(state) != {field.name for field in fields(cls)}:
            raise unreadable
        try:
            return cls(**state)
        except (TypeError, ValueError) as error:  # for instance, a decay style of a plugin that is not loaded
            raise unreadable from error

    def differences(self, other: Schedule) -> dict[str, tuple[Any, Any]]:
        mine, theirs = self.state(), other.state()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


def resume_schedule(policy: str, configured: Schedule, saved: Mapping[str, Any]) -> Schedule:
    """Return the schedule of a run that continues from a checkpoint.

    Args:
        policy: the value of ``Engine.save_load.lr_schedule``. ``config`` selects ``configured``,
            ``checkpoint`` selects ``saved``, and ``strict`` requires that both are equal.

    Raises:
        CheckpointError: the schedules differ under ``strict``, or ``saved`` is needed and cannot be read.
    """
    if isinstance(saved, Mapping):
        saved = _of_this_version(saved)
    if policy == "config":
        if saved != configured.state():
            get_logger().warning(
                "the learning rate follows the schedule of this configuration, not the saved one"
            )
        return configured
    from_checkpoint = Schedule.from_state(saved)
    different = configured.differences(from_checkpoint)
    listing = ", ".join(f"{name}: {here} now, {there} saved" for name, (here, there) in different.items())
    if policy == "checkpoint":
        if different:
            get_logger().warning(f"the learning-rate schedule of the checkpoint is kept ({listing})")
        return from_checkpoint
    if different:
        raise CheckpointError(
            f"the learning-rate schedule differs from the checkpoint's ({listing}); set "
            "Engine.save_load.lr_schedule to checkpoint (keep the saved one) or config (use the new one)"
        )
    return configured


def _of_this_version(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the state of a schedule from an older checkpoint to the fields of this version."""
    return {"unit": "step"} | {key: value for key, value in saved.items() if (key, value) != ("init_lr", 0.0)}


def build_schedule(cfg_optimizer: OptimizerConfig, length: int) -> Schedule:
    """Build the schedule that section ``Optimizer`` configures.

    Args:
        length: number of optimizer steps of the run, or of training samples if the schedule counts samples
            (``LRConfig.in_units``). It is the length of a weight-decay ramp, and the default of
            ``decay_steps``.

    Raises:
        ConfigError: the lengths contradict each other (:class:`Schedule`). Also raised if the decay function
            returns an invalid learning rate for the first step after the warm-up, or for ``decay_steps``.
    """
    lr = cfg_optimizer.lr
    decay_steps = lr.decay_steps or length
    of_rate = (lr.warmup_rate or 0.0) * decay_steps
    wsd_steps = lr.wsd_decay_steps or max(1, decay_steps // 10)
    schedule = Schedule(
        max_lr=lr.max_lr,
        min_lr=lr.min_lr,
        warmup_steps=of_rate if lr.warmup_steps is None else lr.warmup_steps,
        decay_steps=decay_steps,
        decay_style=lr.decay_style,
        wsd_decay_steps=wsd_steps if lr.decay_style == "wsd" else None,
        wsd_decay_style=lr.wsd_decay_style,
        **_weight_decay(cfg_optimizer, length),
        unit=lr.unit,
    )
    for position in (math.floor(schedule.warmup_steps) + 1, max(schedule.decay_steps, 1)):
        schedule.lr(position)
    return schedule


def _weight_decay(cfg_optimizer: OptimizerConfig, length: int) -> dict[str, Any]:
    ramp = cfg_optimizer.weight_decay_schedule
    if ramp is None:
        constant = cfg_optimizer.weight_decay
        return {"start_weight_decay": constant, "end_weight_decay": constant}
    return {
        "start_weight_decay": ramp.start,
        "end_weight_decay": ramp.end,
        "weight_decay_style": ramp.style,
        "weight_decay_steps": length,
    }


# -- the decay functions that ``Optimizer.lr.decay_style`` names


WSD_COEFFICIENT: dict[str, Callable[[float], float]] = {
    "exponential": lambda u: 2.0 * 0.5**u - 1.0,
    "linear": lambda u: 1.0 - u,
    "cosine": lambda u: 0.5 * (1.0 + math.cos(math.pi * u)),
    "minus_sqrt": lambda u: 1.0 - math.sqrt(u),
}
"""Functions of u, the completed fraction of the final decay, by ``wsd_decay_style``. They return the
remaining fraction of ``max_lr - min_lr``."""


def cosine(n: int, schedule: Schedule) -> float:
    """Decay by half a cosine from `max_lr` at the end of the warm-up to `min_lr` at step `decay_steps`."""
    left = 0.5 * (1.0 + math.cos(math.pi * _decay_progress(n, schedule)))
    return schedule.min_lr + (schedule.max_lr - schedule.min_lr) * left


def linear(n: int, schedule: Schedule) -> float:
    """Decay linearly from `max_lr` at the end of the warm-up to `min_lr` at step `decay_steps`."""
    return schedule.min_lr + (schedule.max_lr - schedule.min_lr) * (1.0 - _decay_progress(n, schedule))


def constant(n: int, schedule: Schedule) -> float:
    """Return `max_lr` for every step after the warm-up."""
    return schedule.max_lr


def inverse_square_root(n: int, schedule: Schedule) -> float:
    """Decay with the inverse square root of the step n: ``max_lr * sqrt(W / n)``, but at least ``min_lr``.
    Here W is the length of the warm-up, or 1 without a warm-up."""
    rate = schedule.max_lr * math.sqrt(max(schedule.warmup_steps, 1.0)) / math.sqrt(max(n, 1))
    return max(schedule.min_lr, rate)


def wsd(n: int, schedule: Schedule) -> float:
    """Stay at `max_lr` until step `decay_steps - wsd_decay_steps`, then decay to `min_lr` at step
    `decay_steps` (warmup-stable-decay)."""
    assert schedule.wsd_decay_steps is not None
    annealing_start = schedule.decay_steps - schedule.wsd_decay_steps
    if n <= annealing_start:
        return schedule.max_lr
    coefficient = WSD_COEFFICIENT[schedule.wsd_decay_style]((n - annealing_start) / schedule.wsd_decay_steps)
    return schedule.min_lr + (schedule.max_lr - schedule.min_lr) * coefficient


def _decay_progress(n: int, schedule: Schedule) -> float:
    return (n - schedule.warmup_steps) / (schedule.decay_steps - schedule.warmup_steps)
