"""What a run records of its steps and evaluations, for every file and service that keeps it."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from ppfleetx.core.engine.callbacks.base import Callback
from ppfleetx.core.engine.callbacks.utilization import device_utilization
from ppfleetx.core.engine.callbacks.window import Window
from ppfleetx.core.engine.run import EvalRecord, Run, StepRecord
from ppfleetx.core.engine.spikes import Spike


class Recorder(Callback):
    """Makes a record every ``logging_freq`` steps and of each evaluation; times and speeds are means since
    the last record.

    Args:
        logging_freq: steps between records.
    """

    def __init__(self, logging_freq: int) -> None:
        self._logging_freq = logging_freq
        self._window = Window()

    @abstractmethod
    def keep(self, record: dict[str, Any]) -> None:
        """Write a record: ``kind`` (``train`` or ``eval``), ``step``, and JSON values."""

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        self._window.add(record)
        if record.step % self._logging_freq and record.step != run.max_steps:
            return
        self.keep(train_record(run, record, self._window))
        self._window = Window()

    def on_eval_end(self, run: Run, record: EvalRecord) -> None:
        self.keep(eval_record(record))

    def on_spike(self, run: Run, spike: Spike) -> None:
        if spike.to_step is not None:
            self._window = Window()


def train_record(run: Run, record: StepRecord, window: Window) -> dict[str, Any]:
    """A step, with the means of ``window``."""
    utilization = device_utilization(run.cfg, run.ctx.device)
    return {
        "kind": "train",
        "step": record.step,
        "epoch": record.epoch,
        "loss": _number(record.loss),
        "lr": record.lr,
        "weight_decay": record.weight_decay,
        "grad_norm": _number(record.grad_norm),
        "tokens": record.num_valid_tokens,
        "consumed_samples": run.state.consumed_samples,
        "reader_cost": window.reader_cost,
        "batch_cost": window.batch_cost,
        "ips_total": window.ips_total,
        "ips": window.ips,
        **({} if utilization is None else utilization.rates(window.batch_cost)),
        **_scaling(record, run.state.skipped_steps),
        **_sources(record),
        **_metrics(record.own_metrics),
        **({} if record.pruned is None else {"pruned": record.pruned}),
    }


def eval_record(record: EvalRecord) -> dict[str, Any]:
    """An evaluation."""
    is_classifier = record.ppl is None
    return {
        "kind": "eval",
        "step": record.step,
        **({} if record.name is None else {"set": record.name}),
        "loss": _number(record.loss),
        **({} if is_classifier else {"ppl": _number(record.ppl)}),
        **_metrics(record.metrics),
        "examples" if is_classifier else "tokens": record.num_valid_tokens,
        "seconds": record.seconds,
    }


def numbers_of(record: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a record by name: ``train/loss``, ``train/source/wiki/loss``, ``eval/ppl``, and
    ``eval/wiki/ppl`` of a set with a name."""
    where = "/".join(filter(None, (record["kind"], record.get("set"))))
    found: dict[str, Any] = {}
    for key, value in record.items():
        if key == "sources":
            for source, part in value.items():
                found |= {f"{where}/source/{source}/{name}": number for name, number in part.items()}
        elif key == "metrics":
            found |= {f"{where}/{name}": number for name, number in value.items()}
        elif key not in ("kind", "step", "set"):
            found[f"{where}/{key}"] = value
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def _number(value: float) -> float | None:
    """JSON knows neither infinity nor NaN: they are null."""
    return value if math.isfinite(value) else None


def _scaling(record: StepRecord, skipped_steps: int) -> dict[str, Any]:
    if record.loss_scale is None:
        return {}
    return {
        "loss_scale": record.loss_scale,
        "found_inf": int(record.skipped),
        "skipped_steps": skipped_steps,
    }


def _sources(record: StepRecord) -> dict[str, Any]:
    if not record.sources:
        return {}
    told = record.sources.items()
    return {"sources": {name: {"loss": _number(s.mean), "tokens": s.count} for name, s in told}}


def _metrics(metrics: Mapping[str, float]) -> dict[str, Any]:
    return {"metrics": {name: _number(value) for name, value in metrics.items()}} if metrics else {}
