"""Log the predicted and measured memory and time of a run on its devices."""

from __future__ import annotations

import resource
import statistics
import sys
from typing import TYPE_CHECKING

from ppfleetx.config.message_text import ranks_text
from ppfleetx.core.engine.callbacks.base import Callback, CallbackSetup
from ppfleetx.core.engine.run_view import Run, StepRecord
from ppfleetx.distributed import device as devices
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import gather
from ppfleetx.distributed.device import is_card, peak_memory, total_memory
from ppfleetx.planner.cards import GIB
from ppfleetx.planner.prediction import Prediction, run_prediction
from ppfleetx.planner.report import verdict
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    import paddle

    from ppfleetx.parallel.step_runner import StepRunner


def device_name(device: str) -> str:
    """Return the name that the driver gives for this process's card, such as ``NVIDIA A100-SXM4-80GB``.
    Returns "" on a CPU, or if the name is unknown."""
    found = total_memory() if is_card(device) else None
    return "" if found is None else found[1]


class MemoryLog(Callback):
    """Logs the memory of parameters and optimizer state after the first step, and the peak memory at the
    end."""

    def __init__(self) -> None:
        self._said = False

    @classmethod
    def of(cls, setup: CallbackSetup) -> MemoryLog | None:
        return cls() if setup.trains else None

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        if self._said:
            return
        self._said = True
        parameters = sum(_bytes(p) for _, p in run.runner.named_parameters())
        states = sum(_bytes(t) for t in run.runner.optimizer_state().values())
        where = " in host memory" if run.ctx.plan.sharding_offload else ""
        get_logger().info(
            f"memory: parameters {_mib(parameters)}, optimizer state {_mib(states)}{where}, {_peak_text(run)}"
        )

    def on_fit_end(self, run: Run) -> None:
        get_logger().info(f"memory: {_peak_text(run)}")


def _peak_text(run: Run) -> str:
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    text = f"peak host {_mib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}"
    if is_card(run.ctx.device):
        text += f", peak device {_mib(devices.peak_memory())}"
    return text


def _bytes(tensor: paddle.Tensor) -> int:
    return tensor.size * tensor.element_size()


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


_WARM_UP = 2  # skip the first steps, in which kernels are chosen and states are created
_KEPT = 4096


class Forecast(Callback):
    """Logs the predicted and the measured memory and step time at the end of a run. Warns before the first
    step if the predicted memory exceeds the card's memory."""

    def __init__(self, prediction: Prediction, *, named: bool) -> None:
        self._prediction, self._named = prediction, named
        self._seconds: list[float] = []
        self._steps = 0

    @classmethod
    def of(cls, setup: CallbackSetup) -> Forecast | None:
        if not setup.trains:
            return None
        device = setup.ctx.device
        prediction = run_prediction(setup.cfg, device, device_name=device_name(device))
        return None if prediction is None else cls(prediction, named=setup.cfg.Global.card is not None)

    def on_fit_start(self, run: Run) -> None:
        if (found := total_memory()) is not None:
            there, name = found
            needed = self._prediction.memory[run.ctx.rank_on("pp")].peak
            if needed > there:
                get_logger().warning(
                    f"memory: {needed / GIB:.1f} GiB are predicted; {verdict(needed, there, name)}"
                )

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        self._steps += 1
        if self._steps > _WARM_UP and len(self._seconds) < _KEPT:
            self._seconds.append(record.batch_cost)

    def on_fit_end(self, run: Run) -> None:
        if not self._seconds:
            return
        predicted = self._prediction.memory[run.ctx.rank_on("pp")].tensors / 2**20
        low, middle, high = self._prediction.time.interval
        card = self._prediction.cluster.card.name
        which = card if self._named else f"{card}, which Global.card can change"
        get_logger().info(
            f"predicted and measured: memory of tensors {predicted:.1f} and {peak_memory() / 2**20:.1f} MiB, "
            f"step {middle:.4g} ({low:.4g} to {high:.4g}) and {statistics.median(self._seconds):.4g} s "
            f"(constants of {which})"
        )


_MAX_RANKS_SHOWN = 16


def rank_table(ctx: ParallelContext, runner: StepRunner) -> list[str]:
    """Return log lines that show the number of parameters and the pp and mp coordinates of each rank. Ranks
    with the same values share a line. After 16 lines, the rest is shown as ``...``. If there is only one
    rank, the list is empty. All ranks must call this."""
    held = sum(parameter.size for _, parameter in runner.named_parameters())
    counts = gather(ctx, held)
    if ctx.world_size == 1:
        return []
    lines: dict[str, list[int]] = {}
    for rank, count in enumerate(counts):
        at = ctx.plan.coordinates(rank)
        place = ", ".join(f"{axis} {at[axis]}" for axis in ("pp", "mp") if ctx.size_of(axis) > 1)
        lines.setdefault(f"{count:,} parameters" + (f" ({place})" if place else ""), []).append(rank)
    shown = [f"{ranks_text(ranks):<14} {text}" for text, ranks in list(lines.items())[:_MAX_RANKS_SHOWN]]
    return shown + (["..."] if len(lines) > len(shown) else [])


def offload_notes(ctx: ParallelContext) -> list[str]:
    if not ctx.plan.sharding_offload or ctx.device != "cpu":
        return []
    return ["offload saves nothing on a CPU: the states are in host memory anyway"]
