"""Learning-rate decay functions by their names in ``Optimizer.lr.decay_style``.

A decay function ``(n, schedule) -> rate`` takes the current step n and a
:class:`~ppfleetx.optims.schedules.Schedule`. It reads the schedule's ``max_lr``, ``min_lr``, ``warmup_steps``
(W, which may be a fraction of D and then need not be whole) and ``decay_steps`` (D). It is called only for W
< n <= D or, if registered with ``ScheduleTraits(decays=False)``, for every n > W. The formulas are the same
as in Megatron's parameter scheduler, with steps instead of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppfleetx.optims.schedules import Schedule


WSD_COEFFICIENT: dict[str, Callable[[float], float]] = {
    "exponential": lambda u: 2.0 * 0.5**u - 1.0,
    "linear": lambda u: 1.0 - u,
    "cosine": lambda u: 0.5 * (1.0 + math.cos(math.pi * u)),
    "minus_sqrt": lambda u: 1.0 - math.sqrt(u),
}
"""The share of ``max_lr - min_lr`` that is left after the share u of the final decay."""


def cosine(n: int, schedule: Schedule) -> float:
    """Half a cosine from `max_lr` at W down to `min_lr` at D."""
    left = 0.5 * (1.0 + math.cos(math.pi * _done(n, schedule)))
    return schedule.min_lr + (schedule.max_lr - schedule.min_lr) * left


def linear(n: int, schedule: Schedule) -> float:
    """A straight line from `max_lr` at W to `min_lr` at D."""
    return schedule.min_lr + (schedule.max_lr - schedule.min_lr) * (1.0 - _done(n, schedule))


def constant(n: int, schedule: Schedule) -> float:
    """`max_lr` at every step."""
    return schedule.max_lr


def inverse_square_root(n: int, schedule: Schedule) -> float:
    """`max_lr * sqrt(W / n)`, never below `min_lr`; W counts as 1 when there is no warm-up."""
    rate = schedule.max_lr * math.sqrt(max(schedule.warmup_steps, 1.0)) / math.sqrt(max(n, 1))
    return max(schedule.min_lr, rate)


def wsd(n: int, schedule: Schedule) -> float:
    """Warm-up, stable, decay: `max_lr` until D - `wsd_decay_steps`, then down to `min_lr` at D."""
    assert schedule.wsd_decay_steps is not None
    annealing_start = schedule.decay_steps - schedule.wsd_decay_steps
    if n <= annealing_start:
        return schedule.max_lr
    coefficient = WSD_COEFFICIENT[schedule.wsd_decay_style]((n - annealing_start) / schedule.wsd_decay_steps)
    return schedule.min_lr + (schedule.max_lr - schedule.min_lr) * coefficient


def _done(n: int, schedule: Schedule) -> float:
    """The finished share of the way from W to D."""
    return (n - schedule.warmup_steps) / (schedule.decay_steps - schedule.warmup_steps)
