"""Save checkpoints during training, and handle saves that fail (``Engine.save_load.on_save_error``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppfleetx.checkpoint.adapters import BASE
from ppfleetx.checkpoint.manager import BackgroundManager, CheckpointManager
from ppfleetx.checkpoint.manifest import step_directory
from ppfleetx.checkpoint.output_dir import write_best
from ppfleetx.checkpoint.rng import gather_rng_state
from ppfleetx.checkpoint.run_ownership import Ownership
from ppfleetx.checkpoint.slices import TensorSlice
from ppfleetx.checkpoint.state_dict import model_slices, optimizer_slices
from ppfleetx.config.errors import CheckpointError, UserError
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.engine.resume_checks import Fingerprints
from ppfleetx.core.engine.run_view import Run
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import joint_errors
from ppfleetx.resilience.progress import PROGRESS, SAVING
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.parallel.step_runner import StepRunner


class Saver:
    """Saves a run's model, optimizer, progress, schedule and random generators as one checkpoint.

    All ranks must call the methods in the same order. A failed save raises a UserError with the same message
    on all ranks. With ``on_save_error: continue``, only a failure of the last save is raised, at the end of
    the run.
    """

    def __init__(
        self,
        cfg: RunConfig,
        ctx: ParallelContext,
        output_dir: Path,
        fingerprints: Fingerprints,
        ownership: Ownership,
        documents: Mapping[str, bytes] | None = None,
    ) -> None:
        manager = BackgroundManager if cfg.Engine.save_load.async_save else CheckpointManager
        self._ctx, self._trained_alone = ctx, fingerprints.get(BASE) is not None
        self._stops = cfg.Engine.save_load.on_save_error == "stop"
        self._failure: UserError | None = None
        self._manager = manager(
            output_dir,
            ownership,
            ctx=ctx,
            plan=asdict(cfg.plan),
            config=cfg.model_dump(mode="json"),
            fingerprints=dict(fingerprints),
            vocab_size=cfg.Model.vocab_size,
            documents=documents or {},
        )

    def save(self, run: Run) -> None:
        """Wait for any earlier save, then save the run's current state. With ``async_save``, the save
        continues in the background."""
        self.complete()
        self._failure = None
        with PROGRESS.at(SAVING), self._guarded():
            run.runner.before_update = self._manager.wait_for_copy
            self._manager.save(
                epoch=run.state.epoch,
                step=run.state.step,
                tensors=self._tensors(run.runner),
                state=self._state(run),
            )

    def mark_best(self, run: Run) -> bool:
        """Write the name of the current step's checkpoint to the file ``best`` in the output directory, and
        delete old checkpoints beyond ``keep_max``. Returns False if this or the save of the checkpoint
        failed, else True."""
        self.complete()
        if self._failure is not None:
            return False
        path = self._manager.output_dir / step_directory(run.state.epoch, run.state.step)
        with self._guarded(), joint_errors(self._ctx, name_ranks=False):
            if self._ctx.is_main and path.is_dir():  # the checkpoint that a run resumed from may be elsewhere
                write_best(path, self._manager.ownership)
        is_marked, self._failure = self._failure is None, None  # the checkpoint itself is saved
        return is_marked

    def complete(self) -> None:
        with PROGRESS.at(SAVING), self._guarded():
            self._manager.wait()

    def poll(self) -> None:
        """Advance a background save without waiting for it. ``on_save_error`` decides how a failure is
        handled."""
        with self._guarded():
            self._manager.poll()

    @contextlib.contextmanager
    def completing(self) -> Iterator[None]:
        """Context manager for a training run: on exit, it waits for the last save, and raises a UserError
        if that save failed. After an exception other than a UserError, an unfinished save is abandoned."""
        try:
            yield
        except UserError:  # the same error on all ranks, so collectives still work
            with contextlib.suppress(UserError):
                self._finish()
            raise
        except Exception:
            # If only this rank fails, the others may have ended: do not wait for them.
            self._manager.abandon()
            raise
        self._finish()

    def _finish(self) -> None:
        self.complete()
        if self._failure is not None:
            raise CheckpointError(f"{self._failure} The end of the run is not saved.")

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            if self._stops:
                raise
            self._failure = error
            get_logger().error(f"{error} Training continues (Engine.save_load.on_save_error=continue).")

    def _tensors(self, runner: StepRunner) -> list[TensorSlice]:
        """Return the slices of parameters and optimizer states that this rank saves. With
        ``Model.lora.base``, the frozen base weights are left out."""
        parameters = [(name, p) for name, p in runner.named_parameters() if runner.writes(p)]
        if self._trained_alone:
            parameters = [(name, p) for name, p in parameters if not p.stop_gradient]
        held = {name for name, _ in parameters}
        states = {key: tensor for key, tensor in runner.optimizer_state().items() if key[0] in held}
        return [*model_slices(parameters), *optimizer_slices(states, parameters)]

    def _state(self, run: Run) -> dict[str, Any]:
        with joint_errors(self._ctx, name_ranks=False):
            callbacks = run.callback_states()
        return {
            "train": run.state.to_json(),
            "schedule": run.schedule.state(),
            **gather_rng_state(self._ctx),
            "scaler": run.runner.scaler_state(),
            **({"callbacks": callbacks} if callbacks else {}),
        }
