"""What was predicted of a run beside what it took."""

from __future__ import annotations

import statistics

from ppfleetx.core.engine.callbacks.base import Callback, CallbackSetup
from ppfleetx.core.engine.callbacks.utilization import device_name
from ppfleetx.core.engine.run import Run, StepRecord
from ppfleetx.distributed.device import peak_memory, total_memory
from ppfleetx.planner.cards import GIB
from ppfleetx.planner.prediction import Prediction
from ppfleetx.planner.summary import run_prediction, verdict
from ppfleetx.utils.log import get_logger

_WARM_UP = 2  # first steps, in which kernels are chosen and states are made
_KEPT = 4096


class Forecast(Callback):
    """Warns before the first step when a card has less memory than the run is predicted to need, and says in
    one line at the end how the prediction compares with what was measured here."""

    def __init__(self, prediction: Prediction, *, named: bool) -> None:
        self._prediction, self._named = prediction, named
        self._seconds: list[float] = []
        self._steps = 0

    @classmethod
    def of(cls, setup: CallbackSetup) -> Forecast | None:
        """For a training that the planner knows."""
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
