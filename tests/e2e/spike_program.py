"""The training program in the ranks of a pool, with samples on which loss and gradient jump."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.e2e.program import train


def train_with_spikes(
    values: Mapping[str, Any], world: int, bad: Sequence[int], once: bool, factor: float | None
) -> str:
    """:func:`tests.e2e.program.train`; the user's error it ends with, or "".

    Args:
        bad: positions in the training order; a step that has one of them has ``factor`` times the loss and
            gradient norm.
        once: a step that is computed again is as it should be: a fault of the machine.
        factor: null: not a number.
    """
    from ppfleetx.config.errors import UserError
    from ppfleetx.parallel.step import StepRunner

    gradients, repeat, wanted = StepRunner._gradients, StepRunner._repeat, set(bad)
    state = {"repeats": False}

    def spoilt(runner: StepRunner, micro_batches: Any, counts: Any) -> tuple[Any, ...]:
        loss, norm, *rest = gradients(runner, micro_batches, counts)
        here = {int(i) for batch in micro_batches for i in batch["sample_ids"]} & wanted
        if not here or (once and state["repeats"]):
            return loss, norm, *rest
        by = float("nan") if factor is None else factor
        return loss * by, norm * by, *rest

    def repeated(runner: StepRunner, *arguments: Any) -> tuple[float, float]:
        state["repeats"] = True
        try:
            return repeat(runner, *arguments)
        finally:
            state["repeats"] = False

    StepRunner._gradients, StepRunner._repeat = spoilt, repeated
    try:
        train(values, world)
    except UserError as error:
        return str(error)
    finally:
        StepRunner._gradients, StepRunner._repeat = gradients, repeat
    return ""


def train_with_a_slow_rank(values: Mapping[str, Any], world: int, rank: int, seconds: float) -> str:
    """:func:`tests.e2e.program.train`, with a rank that computes so much longer in each step."""
    import os
    import time

    from ppfleetx.parallel.step import StepRunner

    gradients = StepRunner._gradients

    def slow(runner: StepRunner, *arguments: Any) -> tuple[float, float, bool]:
        if os.environ["PADDLE_TRAINER_ID"] == str(rank):
            time.sleep(seconds)
        return gradients(runner, *arguments)

    StepRunner._gradients = slow
    try:
        return train(values, world)
    finally:
        StepRunner._gradients = gradients
