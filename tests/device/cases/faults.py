"""In a rank: a training on the reference device whose memory ends at a chosen moment."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import Any
from unittest import mock

from ppfleetx.config.errors import DeviceError, OutOfMemoryError
from tests.device.cases.training import program
from tests.device.reference import Device

MOMENTS = {
    "start": "ppfleetx.commands.train:build_runner",
    "forward": "ppfleetx.parallel.step_runner:StepRunner._passes",
    "backward": "paddle:Tensor.backward",
    "optimizer": "ppfleetx.optims.optimizer:Optimizer.step",
    "evaluation": "ppfleetx.parallel.step_runner:StepRunner.eval_step",
    "save": "ppfleetx.core.engine.saving:Saver.save",
}
"""What is called when each moment begins."""


def train_until(values: Mapping[str, Any], world: int, moment: str, call: int, leaves: int) -> dict[str, str]:
    """Train; at the ``call``-th call of a moment no more than ``leaves`` bytes are left on the card.

    Returns:
        Name and text of the error that the training ended with; "" where it was none.
    """
    original, calls = pkgutil.resolve_name(MOMENTS[moment]), []

    def called(*given: Any, **named: Any) -> Any:
        calls.append(call)
        if len(calls) == call:
            device = Device()
            device.set("memory", device.used + leaves)
        return original(*given, **named)

    with mock.patch(MOMENTS[moment].replace(":", "."), called):
        try:
            program(values, world)
        except (OutOfMemoryError, DeviceError) as error:
            return {"name": type(error).__name__, "said": str(error)}
    assert len(calls) >= call, f"{MOMENTS[moment]} was called {len(calls)} times"
    return {"name": "", "said": ""}
