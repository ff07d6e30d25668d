"""How a run is saved: the engine's side of ``ppfleetx.checkpoint``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ppfleetx.checkpoint.adapters import BASE
from ppfleetx.checkpoint.background import BackgroundManager
from ppfleetx.checkpoint.housekeeping import write_best
from ppfleetx.checkpoint.manager import CheckpointManager
from ppfleetx.checkpoint.manifest import step_directory
from ppfleetx.checkpoint.ownership import Ownership
from ppfleetx.checkpoint.rng import gather_rng_state
from ppfleetx.checkpoint.tensors import model_slices, optimizer_slices
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.engine.agreement import Fingerprints
from ppfleetx.core.engine.run import Run
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.together import joint_errors


class CheckpointSaver:
    """Saves a run's model, optimizer, progress, schedule and generators as one checkpoint; in the
    background with ``Engine.save_load.async_save``."""

    def __init__(
        self,
        cfg: RunConfig,
        ctx: ParallelContext,
        output_dir: Path,
        fingerprints: Fingerprints,
        ownership: Ownership,
    ) -> None:
        manager = BackgroundManager if cfg.Engine.save_load.async_save else CheckpointManager
        self._ctx, self._trained_alone = ctx, fingerprints.get(BASE) is not None
        self._manager = manager(
            output_dir,
            ownership,
            ctx=ctx,
            plan=asdict(cfg.plan),
            config=cfg.model_dump(mode="json"),
            fingerprints=dict(fingerprints),
            vocab_size=cfg.Model.vocab_size,
        )

    def save(self, run: Run) -> Path:
        """Write the checkpoint of the engine as it stands, or begin to; return where it is or will be."""
        runner = run.runner
        runner.before_update = self._manager.wait_for_copy
        parameters = [(n, p) for n, p in runner.named_parameters() if runner.writes(p)]
        if self._trained_alone:
            parameters = [(name, p) for name, p in parameters if not p.stop_gradient]
        held = {name for name, _ in parameters}
        states = {key: tensor for key, tensor in runner.optimizer_state().items() if key[0] in held}
        return self._manager.save(
            epoch=run.state.epoch,
            step=run.state.step,
            tensors=[*model_slices(parameters), *optimizer_slices(states, parameters)],
            state={
                "train": run.state.to_json(),
                "schedule": run.schedule.state(),
                **gather_rng_state(self._ctx),
                "scaler": runner.scaler_state(),
            },
        )

    def mark_best(self, run: Run) -> None:
        """Let ``best`` name the checkpoint of the engine as it stands."""
        path = self._manager.output_dir / step_directory(run.state.epoch, run.state.step)
        with joint_errors(self._ctx, name_ranks=False):
            if self._ctx.is_main and path.is_dir():  # a run that resumed may have its first elsewhere
                write_best(path, self._manager.ownership)

    def poll(self) -> None:
        """Carry on with a save in the background."""
        self._manager.poll()

    def wait(self) -> None:
        """Complete a save in the background."""
        self._manager.wait()

    def abandon(self) -> None:
        """End without the other ranks, who may be gone."""
        self._manager.abandon()
