"""Callbacks that log steps in the format of FleetX, Megatron-LM or MindSpeed, and a progress bar."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from ppfleetx.core.engine.callbacks.base import Callback, CallbackSetup
from ppfleetx.core.engine.run_view import EvalRecord, Run, StepRecord, Window
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.progress_bar import ProgressBar


class Periodic(Callback):
    """Base class of callbacks that report every ``logging_freq`` steps and after the last step."""

    def __init__(self, logging_freq: int) -> None:
        self._logging_freq = logging_freq
        self._window = Window()

    @classmethod
    def of(cls, setup: CallbackSetup) -> Periodic | None:
        return cls(setup.cfg.Engine.logging_freq)

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        self._window.add(record)
        if record.step % self._logging_freq == 0 or record.step == run.max_steps:
            self.report(run, record, self._window)
            self._window = Window()

    def report(self, run: Run, record: StepRecord, window: Window) -> None:
        """Report a step. ``window`` has mean times and speeds since the previous report."""
        raise NotImplementedError


class TrainLog(Periodic):
    """Logs steps and evaluations in the format of FleetX (PaddleFleetX), the default."""

    def on_fit_start(self, run: Run) -> None:
        if run.utilization is not None:
            get_logger().info(run.utilization.describe())

    def report(self, run: Run, record: StepRecord, window: Window) -> None:
        get_logger().info(_train_line(record, window, window.rates(run)))
        if record.sources:
            listed = ", ".join(f"{name}: {source.mean:.9f}" for name, source in record.sources.items())
            get_logger().info(f"loss per source at global step {record.step}, {listed}")
        if record.own_metrics:
            # Metrics of one layer, such as expert_load/3, are only in the metrics file.
            metrics = {name: value for name, value in record.own_metrics.items() if "/" not in name}
            listed = ", ".join(f"{name}: {value:.9g}" for name, value in metrics.items())
            get_logger().info(f"metrics at global step {record.step}, {listed}")

    def on_eval_end(self, run: Run, record: EvalRecord) -> None:
        what = "examples" if record.ppl is None else "tokens"
        numbers = {**({} if record.ppl is None else {"ppl": record.ppl}), **record.metrics}
        listed = "".join(f"{name}: {value:.4f}, " for name, value in numbers.items())
        get_logger().info(
            f"eval at global step {record.step}, loss: {record.loss:.9f}, {listed}"
            f"{what}: {record.num_valid_tokens:.0f}, cost: {record.seconds:.2f} sec"
            f"{'' if record.name is None else f', set: {record.name}'}"
        )


def _train_line(record: StepRecord, window: Window, rates: Mapping[str, float]) -> str:
    """Return the log line for a step in FleetX's format, which users' scripts parse. ``rates`` has TFLOP/s
    and MFU, from :meth:`Window.rates`."""
    text = (
        f"global step {record.step}, epoch: {record.epoch}, batch: {record.batch}, "
        f"loss: {record.loss:.9f}, avg_reader_cost: {window.reader_cost:.5f} sec, "
        f"avg_batch_cost: {window.batch_cost:.5f} sec, speed: {window.speed:.2f} step/s, "
        f"ips_total: {window.ips_total:.0f} tokens/s, ips: {window.ips:.0f} tokens/s, "
        f"learning rate: {record.lr:.5e}, grad norm: {record.grad_norm:.5f}"
    )
    for name, key in (("TFLOP/s per device", "tflops_per_device"), ("MFU", "mfu")):
        text += f", {name}: {rates[key]:.4g}" if key in rates else ""
    if record.loss_scale is None:
        return text
    return f"{text}, loss_scale: {record.loss_scale:g}, found_inf: {int(record.skipped)}"


_LARGEST_LOSS = 20.0  # Megatron-LM caps the loss at this value for the perplexity


class MegatronLog(Periodic):
    """Logs in the format of Megatron-LM: `` iteration N/ TOTAL | consumed samples: ... |``."""

    def report(self, run: Run, record: StepRecord, window: Window) -> None:
        seconds = window.batch_cost
        scale = "" if record.loss_scale is None else f" loss scale: {record.loss_scale:.1f} |"
        get_logger().info(
            f" iteration {record.step:8d}/{run.max_steps:8d} | consumed samples: "
            f"{run.state.consumed_samples:12d} | elapsed time per iteration (ms): {1000 * seconds:.1f} | "
            f"samples/sec: {record.batch_size / seconds:.3f} | learning rate: {record.lr:.6E} | "
            f"global batch size: {record.batch_size:5d} | lm loss: {record.loss:.6E} |{scale} "
            f"grad norm: {record.grad_norm:.3f} | number of skipped iterations: {window.num_skipped:3d} | "
            f"number of nan iterations:   0 |"
        )

    def on_eval_end(self, run: Run, record: EvalRecord) -> None:
        ppl = math.exp(min(_LARGEST_LOSS, record.loss)) if math.isfinite(record.loss) else record.loss
        where = "" if record.name is None else f" on {record.name}"
        get_logger().info(
            f" validation loss at iteration {record.step}{where} | lm loss value: {record.loss:.6E} | "
            f"lm loss PPL: {ppl:.6E} | "
        )


class MindSpeedLog(Periodic):
    """Prints steps in the format of MindSpeed, ``INFO - Epoch: 0, Step: 13, Loss: ..., Time: ... ms``.
    ``Time`` is the mean step time since the previous line."""

    def report(self, run: Run, record: StepRecord, window: Window) -> None:
        scale = "" if record.loss_scale is None else f", Loss_scale: {record.loss_scale:g}"
        print(
            f"INFO - Epoch: {record.epoch}, Step: {record.step}, Loss: {record.loss:.16f}, "
            f"Time: {1000 * window.batch_cost:.2f} ms, Grad_norm: {record.grad_norm:.6f}, "
            f"Learning_rate: {record.lr:.6e}{scale}",
            flush=True,
        )


class TrainProgress(Callback):
    """Shows a progress bar during training."""

    def __init__(self, show: bool | Literal["auto"]) -> None:
        self._show = show
        self._bar: ProgressBar | None = None

    @classmethod
    def of(cls, setup: CallbackSetup) -> TrainProgress | None:
        return cls(setup.cfg.Engine.progress_bar) if setup.trains else None

    def on_fit_start(self, run: Run) -> None:
        self._bar = ProgressBar(
            "training", total=run.max_steps, completed=run.state.step, unit="step", show=self._show
        )
        self._bar.__enter__()

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        self._bar.advance(1, f"loss {record.loss:.4f}")

    def on_fit_end(self, run: Run) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
