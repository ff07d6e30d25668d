"""In a rank: the most memory of the card at once, before the first step of a training, in it, in a save."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import paddle
from paddle.distributed.fleet.layers.mpu.random import get_rng_state_tracker

from ppfleetx.core.engine.saving import Saver
from ppfleetx.parallel.step_runner import StepRunner
from tests.device.cases.training import program
from tests.device.reference import Device


class _Card:
    """Memory of this rank's card: of the reference device each tensor by itself."""

    def __init__(self, is_reference: bool) -> None:
        self._reference = Device() if is_reference else None

    @property
    def used(self) -> int:
        paddle.device.synchronize()
        return self._reference.used if self._reference else paddle.device.memory_allocated()

    @property
    def peak(self) -> int:
        paddle.device.synchronize()
        return self._reference.peak if self._reference else paddle.device.max_memory_allocated()

    def clear(self) -> None:
        """Look for the peak from now on."""
        paddle.device.synchronize()
        if self._reference:
            self._reference.clear()
        else:
            paddle.device.reset_max_memory_allocated()


def peaks(values: Mapping[str, Any], world: int, is_reference: bool) -> dict[str, int]:
    """Train, and save; bytes at ``start`` (before the first step), in a ``step``, in a ``save``, and between
    them (``kept``). ``stage`` is the pipeline stage of this rank.

    Args:
        values: overrides by dotted key.
        world: number of ranks.
        is_reference: whether the card is the reference device.
    """
    gc.collect()
    get_rng_state_tracker().reset()  # of earlier trainings in this process
    card, found = _Card(is_reference), {}
    before = card.used

    def note(moment: str) -> None:
        found[moment] = max(found.get(moment, 0), card.peak - before)

    def watched(original: Callable[..., Any], moment: str) -> Callable[..., Any]:
        def call(owner: Any, *given: Any, **named: Any) -> Any:
            if "start" not in found:
                note("start")
            card.clear()
            result = original(owner, *given, **named)
            note(moment)
            if moment == "step":
                found["stage"], found["kept"] = owner._ctx.rank_on("pp"), card.used - before
            return result

        return call

    card.clear()
    with (
        mock.patch.object(StepRunner, "train_step", watched(StepRunner.train_step, "step")),
        mock.patch.object(Saver, "save", watched(Saver.save, "save")),
    ):
        program(values, world)
    return found
