"""The FleetX log line, on which users' parsers rely."""

from __future__ import annotations

from collections.abc import Mapping

from ppfleetx.core.engine.callbacks.base import Callback, CallbackSetup
from ppfleetx.core.engine.callbacks.utilization import device_utilization
from ppfleetx.core.engine.callbacks.window import Window
from ppfleetx.core.engine.run import EvalRecord, Run, StepRecord
from ppfleetx.utils.log import get_logger


class TrainLog(Callback):
    """One line every ``logging_freq`` steps; costs and speed are means since the last line."""

    def __init__(self, logging_freq: int) -> None:
        self._logging_freq = logging_freq
        self._window = Window()

    @classmethod
    def of(cls, setup: CallbackSetup) -> TrainLog:
        """For any run."""
        return cls(setup.cfg.Engine.logging_freq)

    def on_fit_start(self, run: Run) -> None:
        utilization = device_utilization(run.cfg, run.ctx.device)
        if utilization is not None:
            get_logger().info(utilization.describe())

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        self._window.add(record)
        if record.step % self._logging_freq == 0 or record.step == run.max_steps:
            utilization = device_utilization(run.cfg, run.ctx.device)
            rates = {} if utilization is None else utilization.rates(self._window.batch_cost)
            get_logger().info(train_line(record, self._window, rates))
            if record.sources:
                get_logger().info(sources_line(record))
            if record.own_metrics:
                get_logger().info(metrics_line(record))
            self._window = Window()

    def on_eval_end(self, run: Run, record: EvalRecord) -> None:
        get_logger().info(eval_line(record))


def eval_line(record: EvalRecord) -> str:
    """An evaluation's result: perplexity of a language model, the metrics of a classifier."""
    what = "examples" if record.ppl is None else "tokens"
    numbers = {**({} if record.ppl is None else {"ppl": record.ppl}), **record.metrics}
    listed = "".join(f"{name}: {value:.4f}, " for name, value in numbers.items())
    return (
        f"eval at global step {record.step}, loss: {record.loss:.9f}, {listed}"
        f"{what}: {record.num_valid_tokens:.0f}, cost: {record.seconds:.2f} sec"
        f"{'' if record.name is None else f', set: {record.name}'}"
    )


def sources_line(record: StepRecord) -> str:
    """The losses of a blend's sources."""
    listed = ", ".join(f"{name}: {source.mean:.9f}" for name, source in record.sources.items())
    return f"loss per source at global step {record.step}, {listed}"


def metrics_line(record: StepRecord) -> str:
    """The task's metrics, and those of the model's layers. Those of one layer (``expert_load/3``) are in the
    file alone."""
    metrics = {name: value for name, value in record.own_metrics.items() if "/" not in name}
    listed = ", ".join(f"{name}: {value:.9g}" for name, value in metrics.items())
    return f"metrics at global step {record.step}, {listed}"


def train_line(record: StepRecord, window: Window, rates: Mapping[str, float] | None = None) -> str:
    """The line's text; its shape is a contract. ``rates`` are those of ``Utilization.rates``."""
    text = (
        f"global step {record.step}, epoch: {record.epoch}, batch: {record.batch}, "
        f"loss: {record.loss:.9f}, avg_reader_cost: {window.reader_cost:.5f} sec, "
        f"avg_batch_cost: {window.batch_cost:.5f} sec, speed: {window.speed:.2f} step/s, "
        f"ips_total: {window.ips_total:.0f} tokens/s, ips: {window.ips:.0f} tokens/s, "
        f"learning rate: {record.lr:.5e}, grad norm: {record.grad_norm:.5f}"
    )
    rates = rates or {}
    for name, key in (("TFLOP/s per device", "tflops_per_device"), ("MFU", "mfu")):
        text += f", {name}: {rates[key]:.4g}" if key in rates else ""
    if record.loss_scale is None:
        return text
    return f"{text}, loss_scale: {record.loss_scale:g}, found_inf: {int(record.skipped)}"
