"""In a rank: training on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from ppfleetx.distributed.device import allow_tf32


def train(**arguments: Any) -> dict[str, Any]:
    """``tests.parity.training:train`` with exact float32 products."""
    from tests.parity import training

    allow_tf32(False)
    return training.train(**arguments)


def train_on_two_levels(**arguments: Any) -> dict[str, Any]:
    """``tests.parallel.test_experts:train_on_two_levels`` with exact float32 products."""
    from tests.parallel import test_experts

    allow_tf32(False)
    return test_experts.train_on_two_levels(**arguments)


def train_in_16_bits(**arguments: Any) -> dict[str, Any]:
    """``tests.parity.low_precision:train``."""
    from tests.parity import low_precision

    allow_tf32(False)
    return low_precision.train(**arguments)


def engine_steps(cfg: Any, ctx: Any, runner: Any) -> Callable[[int], Any]:
    """Takes the step of a number, counted from 0, with what the engine exchanges before it."""
    from ppfleetx.core.engine.rank_consistency import RankConsistency
    from tests.parity.training import micro_batches

    watch, stop = RankConsistency(cfg, ctx, 1e9, runner.count), SimpleNamespace(signal_name=None, agree=bool)

    def take(number: int) -> Any:
        batch = micro_batches(number, cfg, ctx)
        watch.before_step(batch, None, stop, number)
        return runner.train_step(batch, step=number + 1, lr=1e-3, weight_decay=0.1, counts=watch.counts)

    return take


def program(values: Mapping[str, Any], world: int) -> list[str]:
    """What ``ppfleetx train`` does, with exact float32 products; what it has warned of."""
    from ppfleetx.utils.log import get_logger
    from tests.e2e import program as programs

    allow_tf32(False)
    warnings: list[str] = []

    class Warnings(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    handler = Warnings(logging.WARNING)
    get_logger().addHandler(handler)
    try:
        programs.train(values, world)
    finally:
        get_logger().removeHandler(handler)
    return warnings
