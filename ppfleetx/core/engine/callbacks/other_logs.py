"""Log lines of other toolkits, for the programs that read them: Megatron-LM's and MindSpeed-Core-MS's."""

from __future__ import annotations

import math

from ppfleetx.core.engine.callbacks.base import Callback, CallbackSetup
from ppfleetx.core.engine.callbacks.window import Window
from ppfleetx.core.engine.run import EvalRecord, Run, StepRecord
from ppfleetx.utils.log import get_logger

_LARGEST_LOSS = 20.0  # Megatron prints no larger perplexity than that of this loss


class MegatronLog(Callback):
    """`` iteration N/ TOTAL | consumed samples: ... |`` every ``logging_freq`` steps, and a line for each
    evaluation; times and speeds are means since the last line."""

    def __init__(self, logging_freq: int, batch_size: int) -> None:
        self._logging_freq, self._batch_size = logging_freq, batch_size
        self._window = Window()
        self._skipped = 0

    @classmethod
    def of(cls, setup: CallbackSetup) -> MegatronLog:
        """For any run."""
        return cls(setup.cfg.Engine.logging_freq, setup.cfg.batch.global_batch_size)

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        self._window.add(record)
        self._skipped += record.skipped
        if record.step % self._logging_freq and record.step != run.max_steps:
            return
        seconds = self._window.batch_cost
        scale = "" if record.loss_scale is None else f" loss scale: {record.loss_scale:.1f} |"
        get_logger().info(
            f" iteration {record.step:8d}/{run.max_steps:8d} | consumed samples: "
            f"{run.state.consumed_samples:12d} | elapsed time per iteration (ms): {1000 * seconds:.1f} | "
            f"samples/sec: {self._batch_size / seconds:.3f} | learning rate: {record.lr:.6E} | "
            f"global batch size: {self._batch_size:5d} | lm loss: {record.loss:.6E} |{scale} "
            f"grad norm: {record.grad_norm:.3f} | number of skipped iterations: {self._skipped:3d} | "
            f"number of nan iterations:   0 |"
        )
        self._window, self._skipped = Window(), 0

    def on_eval_end(self, run: Run, record: EvalRecord) -> None:
        ppl = math.exp(min(_LARGEST_LOSS, record.loss)) if math.isfinite(record.loss) else record.loss
        where = "" if record.name is None else f" on {record.name}"
        get_logger().info(
            f" validation loss at iteration {record.step}{where} | lm loss value: {record.loss:.6E} | "
            f"lm loss PPL: {ppl:.6E} | "
        )


class MindSpeedLog(Callback):
    """``INFO - Epoch: 0, Step: 13, Loss: ..., Time: ... ms`` every ``logging_freq`` steps; the time is of
    one step. The line is printed as it is, with nothing before it."""

    def __init__(self, logging_freq: int) -> None:
        self._logging_freq = logging_freq
        self._window = Window()

    @classmethod
    def of(cls, setup: CallbackSetup) -> MindSpeedLog:
        """For any run."""
        return cls(setup.cfg.Engine.logging_freq)

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        self._window.add(record)
        if record.step % self._logging_freq and record.step != run.max_steps:
            return
        scale = "" if record.loss_scale is None else f", Loss_scale: {record.loss_scale:g}"
        print(
            f"INFO - Epoch: {record.epoch}, Step: {record.step}, Loss: {record.loss:.16f}, "
            f"Time: {1000 * self._window.batch_cost:.2f} ms, Grad_norm: {record.grad_norm:.6f}, "
            f"Learning_rate: {record.lr:.6e}{scale}",
            flush=True,
        )
        self._window = Window()
