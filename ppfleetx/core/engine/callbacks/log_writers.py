"""``Engine.loggers``: the records of ``metrics.jsonl``, also to TensorBoard and the like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppfleetx.core.engine.callbacks.base import CallbackSetup
from ppfleetx.core.engine.callbacks.records import Recorder, numbers_of
from ppfleetx.core.engine.run import Run
from ppfleetx.core.engine.spikes import Spike
from ppfleetx.core.loggers.base import LogStart, LogWriter
from ppfleetx.core.loggers.build import build_writers
from ppfleetx.core.loggers.visual_dl import VisualDL, visual_dl_is_installed
from ppfleetx.utils.log import get_logger


class LogWriters(Recorder):
    """Gives the numbers of each record to all writers.

    Args:
        writers: by name.
        logging_freq: steps between records.
    """

    def __init__(self, writers: Mapping[str, LogWriter], logging_freq: int) -> None:
        super().__init__(logging_freq)
        self._writers = dict(writers)
        self._started: dict[str, LogWriter] = {}
        self._failed: set[str] = set()

    @classmethod
    def of(cls, setup: CallbackSetup) -> LogWriters | None:
        """For a run that trains and names writers."""
        writers = build_writers(setup.cfg, setup.output_dir) if setup.trains else {}
        return cls(writers, setup.cfg.Engine.logging_freq) if writers else None

    @classmethod
    def visual_dl(cls, setup: CallbackSetup) -> LogWriters | None:
        """VisualDL alone: for training where it is installed and ``Engine.loggers`` does not name it."""
        named = any(item.name == "visualdl" for item in setup.cfg.Engine.loggers)
        if named or not setup.trains or not visual_dl_is_installed():
            return None
        return cls({"visualdl": VisualDL(setup.output_dir)}, setup.cfg.Engine.logging_freq)

    def on_fit_start(self, run: Run) -> None:
        self._start(run, run.state.step)

    def _start(self, run: Run, step: int) -> None:
        start = LogStart(step, run.cfg.model_dump(mode="json"))
        for name, writer in self._writers.items():
            writer.start(start)
            self._started[name] = writer

    def on_spike(self, run: Run, spike: Spike) -> None:
        super().on_spike(run, spike)
        if spike.to_step is not None:  # what came after that checkpoint has not happened
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
