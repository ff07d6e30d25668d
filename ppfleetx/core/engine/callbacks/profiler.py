"""Profile some training steps with Paddle's profiler (section ``Profiler``)."""

from __future__ import annotations

from pathlib import Path

from paddle import profiler

from ppfleetx.config.sections.root import ProfilerConfig
from ppfleetx.core.engine.callbacks.base import Callback, CallbackSetup
from ppfleetx.core.engine.run_view import Run, StepRecord
from ppfleetx.distributed.device import profiler_targets
from ppfleetx.utils.log import get_logger

# Paddle's tables, by key of ``Profiler.summary``.
_VIEWS = {
    "overview": profiler.SummaryView.OverView,
    "device": profiler.SummaryView.DeviceView,
    "model": profiler.SummaryView.ModelView,
    "dist": profiler.SummaryView.DistributedView,
    "kernel": profiler.SummaryView.KernelView,
    "op": profiler.SummaryView.OperatorView,
    "mem": profiler.SummaryView.MemoryView,
    "memcpy": profiler.SummaryView.MemoryManipulationView,
}


class ProfilerCallback(Callback):
    """Profiles the steps from ``Profiler.scheduler[0]`` to ``Profiler.scheduler[1] - 1``, counted from 0 at
    the start of this process. Writes a Chrome trace to the directory ``Profiler.profiler_log`` in the
    output directory, and prints tables."""

    def __init__(self, cfg: ProfilerConfig, output_dir: Path) -> None:
        self._cfg = cfg
        self._directory = output_dir / cfg.profiler_log
        self._profiler: profiler.Profiler | None = None
        self._steps = 0

    @classmethod
    def of(cls, setup: CallbackSetup) -> ProfilerCallback | None:
        wanted = setup.trains and setup.cfg.Profiler.enable
        return cls(setup.cfg.Profiler, setup.output_dir) if wanted else None

    def on_fit_start(self, run: Run) -> None:
        self._profiler = profiler.Profiler(
            targets=profiler_targets(run.ctx.device),
            scheduler=tuple(self._cfg.scheduler),
            on_trace_ready=profiler.export_chrome_tracing(
                str(self._directory), worker_name=f"rank_{run.ctx.rank}"
            ),
            record_shapes=self._cfg.record_shapes,
            profile_memory=self._cfg.profile_memory,
        )
        self._profiler.start()

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        if self._profiler is None:
            return
        self._profiler.step()
        self._steps += 1
        if self._steps == self._cfg.scheduler[1]:
            self._finish()

    def on_fit_end(self, run: Run) -> None:
        if self._profiler is not None:
            self._finish()

    def _finish(self) -> None:
        self._profiler.stop()
        views = [view for key, view in _VIEWS.items() if getattr(self._cfg.summary, key)]
        if self._steps > self._cfg.scheduler[0]:
            self._profiler.summary(
                sorted_by=profiler.SortedKeys.CPUTotal, op_detail=self._cfg.detailed, views=views
            )
            get_logger().info(f"profiler: chrome trace in {self._directory}")
        else:
            get_logger().warning(
                f"profiler: the run ended before step {self._cfg.scheduler[0]}; nothing recorded"
            )
        self._profiler = None
