"""How a run is saved, and what happens when that fails (``Engine.save_load.on_save_error``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ppfleetx.checkpoint.adapters import BASE
from ppfleetx.checkpoint.background import BackgroundManager
from ppfleetx.checkpoint.housekeeping import write_best
from ppfleetx.checkpoint.manager import CheckpointManager
from ppfleetx.checkpoint.manifest import step_directory
from ppfleetx.checkpoint.ownership import Ownership
from ppfleetx.checkpoint.rng import gather_rng_state
from ppfleetx.checkpoint.slices import TensorSlice
from ppfleetx.checkpoint.tensors import model_slices, optimizer_slices
from ppfleetx.config.errors import CheckpointError, UserError
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.engine.resume_checks import Fingerprints
from ppfleetx.core.engine.run import Run
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.together import joint_errors
from ppfleetx.parallel.runner import Runner
from ppfleetx.utils.log import get_logger


class Saver:
    """Saves a run's model, optimizer, progress, schedule and generators as one checkpoint; in the
    background with ``Engine.save_load.async_save``.

    All ranks of a job call its methods together, and the same of them raise the same CheckpointError: with
    ``on_save_error: stop`` at once; with ``continue`` errors are reported, and only that of the last save is
    raised, at the end of the run, because then nothing holds the run's result.

    Args:
        cfg: the run's configuration.
        ctx: this process's place.
        output_dir: where the checkpoints go.
        fingerprints: of data, tokenizer and frozen weights.
        ownership: the run that saves, and what it keeps.
        documents: what each checkpoint says of the model (`checkpoint/documents.py`).
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
        self._failure: CheckpointError | None = None
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
        """Complete what is under way, then write the checkpoint of the run as it stands, or begin to.

        Raises:
            CheckpointError: as configured.
        """
        with self._guarded():
            self._manager.wait()
        self._failure = None
        with self._guarded():
            run.runner.before_update = self._manager.wait_for_copy
            self._manager.save(
                epoch=run.state.epoch,
                step=run.state.step,
                tensors=self._tensors(run.runner),
                state=self._state(run),
            )

    def mark_best(self, run: Run) -> None:
        """Complete what is under way and let ``best`` name the checkpoint of the run as it stands, unless
        that failed.

        Raises:
            CheckpointError: as configured.
        """
        with self._guarded():
            self._manager.wait()
        if self._failure is not None:
            return
        path = self._manager.output_dir / step_directory(run.state.epoch, run.state.step)
        with self._guarded(), joint_errors(self._ctx, name_ranks=False):
            if self._ctx.is_main and path.is_dir():  # a run that resumed may have its first elsewhere
                write_best(path, self._manager.ownership)

    def complete(self) -> None:
        """Complete what is under way.

        Raises:
            CheckpointError: as configured.
        """
        with self._guarded():
            self._manager.wait()

    def poll(self) -> None:
        """Carry on with a save in the background, and learn without waiting what became of it.

        Raises:
            CheckpointError: as configured.
        """
        with self._guarded():
            self._manager.poll()

    @contextlib.contextmanager
    def completing(self) -> Iterator[None]:
        """For the whole run: at its end, what is under way is completed if that is possible.

        Raises:
            CheckpointError: the last save failed.
        """
        try:
            yield
        except UserError:  # the same on all ranks, so they can still act together
            with contextlib.suppress(CheckpointError):
                self._finish()
            raise
        except Exception:
            self._manager.abandon()
            raise
        self._finish()

    def _finish(self) -> None:
        with self._guarded():
            self._manager.wait()
        if self._failure is not None:
            raise CheckpointError(f"{self._failure} The end of the run is thus not saved.")

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if self._stops:
                raise
            self._failure = error
            get_logger().error(f"{error} Training goes on (Engine.save_load.on_save_error=continue).")

    def _tensors(self, runner: Runner) -> list[TensorSlice]:
        """What this rank writes: of a run with frozen weights, only what it trains."""
        parameters = [(name, p) for name, p in runner.named_parameters() if runner.writes(p)]
        if self._trained_alone:
            parameters = [(name, p) for name, p in parameters if not p.stop_gradient]
        held = {name for name, _ in parameters}
        states = {key: tensor for key, tensor in runner.optimizer_state().items() if key[0] in held}
        return [*model_slices(parameters), *optimizer_slices(states, parameters)]

    def _state(self, run: Run) -> dict[str, Any]:
        callbacks: dict[str, Any] = {}
        try:
            with joint_errors(self._ctx, name_ranks=False):
                callbacks = run.callback_states()
        except UserError as error:
            raise CheckpointError(str(error)) from error
        return {
            "train": run.state.to_json(),
            "schedule": run.schedule.state(),
            **gather_rng_state(self._ctx),
            "scaler": run.runner.scaler_state(),
            **({"callbacks": callbacks} if callbacks else {}),
        }
