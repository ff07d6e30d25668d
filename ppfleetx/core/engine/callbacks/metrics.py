"""Write the results of steps and evaluations to ``metrics.jsonl`` and to the log writers of
``Engine.loggers``."""

from __future__ import annotations

import errno
import importlib.util
import inspect
import json
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ppfleetx.config.errors import ConfigError, shown
from ppfleetx.config.ineffective_options import refuse_absent
from ppfleetx.config.registries import LOGGERS
from ppfleetx.config.sections.engine import CallbackConfig, LoggerConfig
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.engine.callbacks.base import CallbackSetup
from ppfleetx.core.engine.callbacks.log_lines import Periodic
from ppfleetx.core.engine.check_output_dir import METRICS_FILE
from ppfleetx.core.engine.run_view import EvalRecord, Run, StepRecord, Window
from ppfleetx.core.loggers.base import LogStart, LogWriter
from ppfleetx.core.loggers.files import VisualDL
from ppfleetx.resilience.loss_spikes import Spike
from ppfleetx.resilience.stragglers import Stragglers
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.output_files import atomic_write, put_aside


class Recorder(Periodic):
    """Base class of callbacks that write a record every ``logging_freq`` steps and for each evaluation."""

    @abstractmethod
    def keep(self, record: dict[str, Any]) -> None:
        """Write one record: JSON values by name, which always include ``kind`` (such as ``train`` or
        ``eval``) and ``step``."""

    def report(self, run: Run, record: StepRecord, window: Window) -> None:
        self.keep(train_record(run, record, window))

    def on_eval_end(self, run: Run, record: EvalRecord) -> None:
        self.keep(eval_record(record))

    def on_spike(self, run: Run, spike: Spike) -> None:
        if spike.to_step is not None:
            self._window = Window()


def train_record(run: Run, record: StepRecord, window: Window) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": record.step,
        "epoch": record.epoch,
        "loss": _finite_or_none(record.loss),
        "lr": record.lr,
        "weight_decay": record.weight_decay,
        "grad_norm": _finite_or_none(record.grad_norm),
        "tokens": record.num_valid_tokens,
        "consumed_samples": run.state.consumed_samples,
        "num_steps": window.num_steps,
        "reader_cost": window.reader_cost,
        "batch_cost": window.batch_cost,
        "ips_total": window.ips_total,
        "ips": window.ips,
        **window.rates(run),
        **_scaling(record, run.state.skipped_steps),
        **_sources(record),
        **_metrics(record.own_metrics),
        **({} if record.pruned is None else {"pruned": record.pruned}),
    }


def eval_record(record: EvalRecord) -> dict[str, Any]:
    is_classifier = record.ppl is None
    return {
        "kind": "eval",
        "step": record.step,
        **({} if record.name is None else {"set": record.name}),
        "loss": _finite_or_none(record.loss),
        **({} if is_classifier else {"ppl": _finite_or_none(record.ppl)}),
        **_metrics(record.metrics),
        "examples" if is_classifier else "tokens": record.num_valid_tokens,
        "seconds": record.seconds,
    }


def numbers_of(record: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record under names like ``train/loss``, ``train/source/wiki/loss``,
    ``eval/ppl`` or, for an evaluation set named ``wiki``, ``eval/wiki/ppl``."""
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


def _finite_or_none(value: float) -> float | None:
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
    items = record.sources.items()
    return {"sources": {name: {"loss": _finite_or_none(s.mean), "tokens": s.count} for name, s in items}}


def _metrics(metrics: Mapping[str, float]) -> dict[str, Any]:
    return {"metrics": {name: _finite_or_none(value) for name, value in metrics.items()}} if metrics else {}


class MetricsFile(Recorder):
    """Writes ``metrics.jsonl``, with one JSON object per line. A resumed run drops the lines after the step
    of its checkpoint. A new run renames an existing ``metrics.jsonl``."""

    def __init__(self, path: Path, logging_freq: int) -> None:
        super().__init__(logging_freq)
        self._path = path

    @classmethod
    def of(cls, setup: CallbackSetup) -> MetricsFile | None:
        if not setup.trains:
            return None
        return cls(setup.output_dir / METRICS_FILE, setup.cfg.Engine.logging_freq)

    def on_fit_start(self, run: Run) -> None:
        state = run.state
        if state.step:
            self._forget(
                state.step,
                max_consumed_samples=state.consumed_samples,
                max_evaluated_step=state.evaluated_step,
            )
        elif self._path.exists():
            get_logger().info(f"renamed the metrics of an earlier run to {put_aside(self._path)}")

    def on_spike(self, run: Run, spike: Spike) -> None:
        super().on_spike(run, spike)
        if spike.to_step is not None:  # drop the steps after that checkpoint
            self._forget(spike.to_step)
        fields = spike.to_json()
        at_step = fields.pop("step")
        step = at_step if spike.to_step is None else spike.to_step
        consumed = run.state.consumed_samples
        self.keep({"kind": "spike", "step": step, "at_step": at_step, "consumed_samples": consumed, **fields})

    def on_stragglers(self, run: Run, found: Stragglers) -> None:
        self.keep({"kind": "stragglers", **found.to_json()})

    def _forget(self, step: int, **limits: float) -> None:
        try:
            keep_until(self._path, step, **limits)
        except OSError as error:
            get_logger().error(
                f"{self._path} still has records after global step {step}, which are void: {error.strerror}"
            )

    def keep(self, record: dict[str, Any]) -> None:
        """Append the record to ``metrics.jsonl`` as one complete line, or not at all. A write error, such as
        a full disk, is logged, and training continues."""
        line = (json.dumps(record) + "\n").encode()
        try:
            # Opened for each line, so that a killed run leaves complete lines.
            with self._path.open("ab", buffering=0) as file:
                start = file.seek(0, os.SEEK_END)
                if file.write(line) != len(line):
                    file.truncate(start)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            get_logger().error(f"global step {record['step']} is not in {self._path}: {error.strerror}")


def keep_until(
    path: Path, step: int, *, max_consumed_samples: float = math.inf, max_evaluated_step: float = math.inf
) -> None:
    """Remove the records of steps after ``step``, and incomplete lines, from a metrics file.

    Args:
        max_consumed_samples: also remove spike records whose ``consumed_samples`` is larger. After going back
            to a checkpoint, a run writes the checkpoint's step into the spike record, so the step alone does
            not show that the record is newer.
        max_evaluated_step: also remove records of evaluations after this step.
    """
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if _has_happened(line, step, max_consumed_samples, max_evaluated_step)]
    if kept != lines:
        with atomic_write(path, "w") as file:
            file.write("".join(f"{line}\n" for line in kept))


def _has_happened(line: str, step: int, max_consumed_samples: float, max_evaluated_step: float) -> bool:
    try:
        record = json.loads(line)
        at_step = record["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return False  # such as an incomplete last line
    match record.get("kind"):
        case "eval":  # an interrupted evaluation is repeated when the run resumes at this step
            return at_step <= min(step, max_evaluated_step)
        case "spike":  # if the run went back to a checkpoint, the record has that checkpoint's step
            if "consumed_samples" not in record and record.get("to_step") is not None:  # of an older version
                return at_step <= step and record["samples"][0] < max_consumed_samples
            return at_step <= step and record.get("consumed_samples", 0) <= max_consumed_samples
        case _:
            return at_step <= step


_KEY = "Engine.loggers"


def check_options(make: Callable[..., Any], item: CallbackConfig | LoggerConfig, key: str) -> None:
    """Raise ConfigError if ``make``, the class or function that creates a callback or logger, does not
    accept the options in ``item``. ``key`` is the configuration key that lists ``item``."""
    if not callable(make):
        raise ConfigError(
            f"was registered as {shown(make)}, which cannot be called", key=key, value=item.name
        )
    signature = inspect.signature(make)
    try:
        signature.bind_partial(None)
    except TypeError:
        first = "setup" if key == "Engine.callbacks" else "output_dir"
        where = f"`__init__(self, {first}, ...)`" if isinstance(make, type) else f"`{first}`"
        raise ConfigError(
            f"is called with `{first}` before its options, and takes no such argument: write {where}",
            key=key,
            value=item.name,
        ) from None
    try:
        signature.bind(None, **item.options)
    except TypeError as error:
        takes = list(signature.parameters)[1:]
        listed = f"it takes {', '.join(takes)}" if takes else "it takes none"
        raise ConfigError(f"options of {item.name}: {error}; {listed}", key=key, value=item.name) from None


def build_writers(cfg: RunConfig, output_dir: Path) -> dict[str, LogWriter]:
    """Create the log writers that ``Engine.loggers`` names, and return them by name. Loggers that are
    callbacks are left out. No file is opened yet. Raises ConfigError if the options of a writer are
    wrong."""
    refuse_absent(cfg)
    found: dict[str, LogWriter] = {}
    for item in cfg.Engine.loggers:
        if LOGGERS.traits(item.name).callback is not None:
            continue
        make = LOGGERS.load(item.name)
        check_options(make, item, _KEY)
        writer = make(output_dir, **item.options)
        if not isinstance(writer, LogWriter):
            raise ConfigError("must be a LogWriter", key=_KEY, value=item.name)
        found[item.name] = writer
    return found


class LogWriters(Recorder):
    """Callback that passes the numbers of each record to log writers. ``writers`` maps names to log
    writers."""

    def __init__(self, writers: Mapping[str, LogWriter], logging_freq: int) -> None:
        super().__init__(logging_freq)
        self._writers = dict(writers)
        self._started: dict[str, LogWriter] = {}
        self._failed: set[str] = set()

    @classmethod
    def of(cls, setup: CallbackSetup) -> LogWriters | None:
        writers = build_writers(setup.cfg, setup.output_dir) if setup.trains else {}
        return cls(writers, setup.cfg.Engine.logging_freq) if writers else None

    @classmethod
    def visual_dl(cls, setup: CallbackSetup) -> LogWriters | None:
        """Create the callback with VisualDL as its only writer. Returns None if the run does not train, if
        VisualDL is not installed, or if ``Engine.loggers`` already names ``visualdl``."""
        named = any(item.name == "visualdl" for item in setup.cfg.Engine.loggers)
        if named or not setup.trains or importlib.util.find_spec("visualdl") is None:
            return None
        return cls({"visualdl": VisualDL(setup.output_dir)}, setup.cfg.Engine.logging_freq)

    def on_fit_start(self, run: Run) -> None:
        self._start(run, run.state.step, evaluated_step=run.state.evaluated_step)

    def _start(self, run: Run, step: int, **limits: float) -> None:
        start = LogStart(step, run.cfg.model_dump(mode="json"), **limits)
        for name, writer in self._writers.items():
            writer.start(start)
            self._started[name] = writer

    def on_spike(self, run: Run, spike: Spike) -> None:
        super().on_spike(run, spike)
        if spike.to_step is not None:  # drop the steps after that checkpoint
            self.on_fit_end(run)
            self._start(run, spike.to_step)

    def keep(self, record: dict[str, Any]) -> None:
        numbers = numbers_of(record)
        for name, writer in self._started.items():
            try:
                writer.write(record["step"], numbers)
            except OSError as error:
                if name not in self._failed:
                    get_logger().error(f"global step {record['step']} cannot be written to {name}: {error}")
                self._failed.add(name)

    def on_fit_end(self, run: Run) -> None:
        while self._started:
            self._started.popitem()[1].finish()

    def state(self) -> Mapping[str, Any]:
        return {name: state for name, writer in self._writers.items() if (state := dict(writer.state()))}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, writer in self._writers.items():
            if name in state:
                writer.load_state(state[name])
