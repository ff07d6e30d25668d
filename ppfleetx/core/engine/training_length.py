"""How long a run is and when it evaluates and saves, in optimizer steps whatever the run mode."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ppfleetx.config.errors import DataError
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.engine.state import TrainState


@dataclass(frozen=True)
class TrainingLength:
    """Optimizer steps of the whole run, and between evaluations and checkpoints (0: never).

    Attributes:
        max_steps: the run ends after exactly so many steps, and saves.
        eval_every, save_every: steps between them.
        steps_per_epoch: steps in one pass over the training split.
    """

    max_steps: int
    eval_every: int = 0
    save_every: int = 0
    steps_per_epoch: float = math.inf

    @classmethod
    def of(cls, cfg: RunConfig, samples_per_epoch: float) -> TrainingLength:
        """TrainingLength of a configuration; run mode ``epoch`` counts passes over the training split.

        Raises:
            DataError: in run mode ``epoch``, the split has less than one global batch.
        """
        engine = cfg.Engine
        if engine.run_mode == "step":
            steps_per_epoch = samples_per_epoch / cfg.batch.global_batch_size
            return cls(
                engine.max_steps, engine.eval_freq or 0, engine.save_load.save_steps or 0, steps_per_epoch
            )
        steps_per_epoch = int(samples_per_epoch // cfg.batch.global_batch_size)
        if steps_per_epoch == 0:
            raise DataError(
                f"Data.Train: one epoch has {samples_per_epoch:.1f} samples, less than the global batch of "
                f"{cfg.batch.global_batch_size} (Global.global_batch_size)"
            )
        return cls(
            min(engine.max_steps, engine.num_train_epochs * steps_per_epoch),
            (engine.eval_freq or 0) * steps_per_epoch,
            (engine.save_load.save_epoch or 0) * steps_per_epoch or engine.save_load.save_steps or 0,
            steps_per_epoch,
        )

    def position(self, steps_done: float) -> tuple[int, int]:
        """(pass over the training split, step within it) of the step that follows ``steps_done`` steps."""
        if math.isinf(self.steps_per_epoch):
            return 0, int(steps_done)
        epoch = int(steps_done // self.steps_per_epoch)
        return epoch, int(steps_done - epoch * self.steps_per_epoch)

    def comes_to(self, state: TrainState, global_batch_size: int, epoch: int, step: int) -> bool:
        """Whether a run that stands at ``state`` will have done this many epochs and steps at some time."""
        samples = state.consumed_samples + (step - state.step) * global_batch_size
        return state.step < step <= self.max_steps and self.position(samples / global_batch_size)[0] == epoch
