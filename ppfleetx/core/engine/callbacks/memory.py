"""One line on memory after the first step, when everything has been allocated, and one at the end."""

from __future__ import annotations

import resource
import sys

import paddle

from ppfleetx.core.engine.callbacks.base import Callback, CallbackSetup
from ppfleetx.core.engine.run import Run, StepRecord
from ppfleetx.distributed import device as devices
from ppfleetx.distributed.device import is_card
from ppfleetx.utils.log import get_logger


class MemoryLog(Callback):
    """Bytes of parameters and optimizer state, and the peak measured on host and device."""

    def __init__(self) -> None:
        self._said = False

    @classmethod
    def of(cls, setup: CallbackSetup) -> MemoryLog | None:
        """For a run that trains."""
        return cls() if setup.trains else None

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        if self._said:
            return
        self._said = True
        parameters = sum(_bytes(p) for _, p in run.runner.named_parameters())
        states = sum(_bytes(t) for t in run.runner.optimizer_state().values())
        where = " in host memory" if run.ctx.plan.sharding_offload else ""
        get_logger().info(
            f"memory: parameters {_mib(parameters)}, optimizer state {_mib(states)}{where}, "
            f"{peak_memory(run)}"
        )

    def on_fit_end(self, run: Run) -> None:
        get_logger().info(f"memory: {peak_memory(run)}")


def peak_memory(run: Run) -> str:
    """Peak resident memory of the process, and of its device where there is one."""
    # Linux counts ru_maxrss in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    text = f"peak host {_mib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}"
    if is_card(run.ctx.device):
        text += f", peak device {_mib(devices.peak_memory())}"
    return text


def _bytes(tensor: paddle.Tensor) -> int:
    return tensor.size * tensor.element_size()


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
