"""Where a run stands, how long it is, and when it evaluates and saves: all in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ppfleetx.config.errors import CheckpointError, DataError, shown
from ppfleetx.config.sections.root import RunConfig


@dataclass
class TrainState:
    """Progress of a run, counted in whole steps.

    Attributes:
        step: steps done, skipped ones included.
        consumed_samples: samples of the training order already used.
        epoch: completed passes over the training split.
        evaluated_step: step of the last whole evaluation; an evaluation that a stop cut short is made up for
            when the run goes on.
        skipped_steps: steps whose gradients overflowed, or that were spikes: their samples are used, but
            neither weights nor learning rate moved.
        best: the highest value of what ``Engine.save_load.keep_best`` judges by; None before the first.
        best_step: when that was.
        spikes: what ``Engine.spike`` remembers of the last steps; empty where it is off.
    """

    step: int = 0
    consumed_samples: int = 0
    epoch: int = 0
    skipped_steps: int = 0
    evaluated_step: int = -1
    best: float | None = None
    best_step: int = -1
    spikes: dict[str, Any] = field(default_factory=dict)

    @property
    def schedule_step(self) -> int:
        """Steps that were taken: what learning rate and weight decay are functions of."""
        return self.step - self.skipped_steps

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint's ``state.train`` holds."""
        tree = asdict(self)
        return tree if self.spikes else {key: value for key, value in tree.items() if key != "spikes"}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrainState:
        """What :meth:`to_json` gave, of this version or an older one.

        Raises:
            CheckpointError: it is no such thing.
        """
        step = _count(data, "step")
        best = data.get("best")
        if best is not None and type(best) not in (int, float):
            raise CheckpointError(f"the progress in the checkpoint is damaged: best is {shown(best)}")
        spikes = data.get("spikes", {})
        if not isinstance(spikes, dict):
            raise CheckpointError(f"the progress in the checkpoint is damaged: spikes is {shown(spikes)}")
        return cls(
            step=step,
            consumed_samples=_count(data, "consumed_samples"),
            epoch=_count(data, "epoch"),
            skipped_steps=_count(data, "skipped_steps", 0),
            evaluated_step=_count(data, "evaluated_step", step, least=-1),
            best=best,
            best_step=_count(data, "best_step", -1, least=-1),
            spikes=spikes,
        )


def _count(data: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 0) -> int:
    value = data.get(key, default)
    if type(value) is not int or not least <= value < 1 << 63:
        raise CheckpointError(f"the progress in the checkpoint is damaged: {key} is {shown(value)}")
    return value


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
