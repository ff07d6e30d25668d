"""The progress of a run (:class:`TrainState`) and its planned length (:class:`TrainingLength`)."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ppfleetx.config.batch_sizes import BatchPlan
from ppfleetx.config.errors import CheckpointError, DataError, shown
from ppfleetx.config.sections.root import RunConfig


@dataclass
class TrainState:
    """The progress of a run after a whole number of steps. Checkpoints store it.

    Attributes:
        step: number of steps done, including skipped ones.
        consumed_samples: number of training samples used. Ramps of the batch size and the sequence length
            depend on this number.
        data_start: value of ``consumed_samples`` when the data last started from the beginning
            (``Engine.save_load.reset_data``).
        epoch: number of completed passes over the training split.
        skipped_steps: number of steps without an update, because gradients overflowed or because the loss
            or the gradient norm was a spike.
        skipped_samples: number of consumed samples without an update: the samples of skipped steps, and
            samples that the run passed over when it went back to a checkpoint after a spike.
        evaluated_step: step of the last complete evaluation.
        best: best evaluation result so far. Depending on ``Engine.save_load.keep_best``, this is the
            negative loss or the mean of the metrics, so larger is better.
        best_step: step of the best result.
        spikes: losses and gradient norms of the last steps, from which loss spikes are detected.
    """

    step: int = 0
    consumed_samples: int = 0
    data_start: int = 0
    epoch: int = 0
    skipped_steps: int = 0
    skipped_samples: int = 0
    evaluated_step: int = -1
    best: float | None = None
    best_step: int = -1
    spikes: dict[str, Any] = field(default_factory=dict)

    @property
    def schedule_step(self) -> int:
        """The number of steps that were not skipped. Learning rate and weight decay depend on this number."""
        return self.step - self.skipped_steps

    @property
    def schedule_samples(self) -> int:
        """The number of samples in the steps that were not skipped."""
        return self.consumed_samples - self.skipped_samples

    def skip_to(self, consumed_samples: int) -> None:
        """Count the samples up to ``consumed_samples`` as consumed and skipped, without a step."""
        self.skipped_samples += consumed_samples - self.consumed_samples
        self.consumed_samples = consumed_samples

    @property
    def data_position(self) -> int:
        """The number of samples used since the data last started from the beginning."""
        return self.consumed_samples - self.data_start

    def to_json(self) -> dict[str, Any]:
        tree = asdict(self)
        return tree if self.spikes else {key: value for key, value in tree.items() if key != "spikes"}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrainState:
        """Read the progress from a checkpoint, which an older version of ppfleetx may have saved. Raises
        CheckpointError if the progress is damaged."""
        try:
            return _STATE.validate_json(json.dumps({"evaluated_step": data.get("step")} | data), strict=True)
        except ValidationError as error:
            wrong = error.errors()[0]
            what = f"{wrong['loc'][0]} is {shown(wrong['input'])}"
            raise CheckpointError(f"the progress in the checkpoint is damaged: {what}") from error


_STATE = TypeAdapter(TrainState)


@dataclass(frozen=True)
class TrainingLength:
    """The number of optimizer steps of a run, and the intervals between its evaluations and checkpoints.

    Attributes:
        max_steps: step after which training ends.
        eval_every: steps between evaluations; 0: never evaluate.
        save_every: steps between checkpoints; 0: no regular checkpoints.
        steps_per_epoch: steps in one pass over the training split, possibly a fraction.
    """

    max_steps: int
    eval_every: int = 0
    save_every: int = 0
    steps_per_epoch: float = math.inf

    @classmethod
    def of(cls, cfg: RunConfig, samples_per_epoch: float) -> TrainingLength:
        """Compute the length from the configuration and the number of samples in the training split. Raises
        DataError if ``Engine.run_mode`` is ``epoch`` and the split is smaller than a global batch."""
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
                f"{cfg.batch.global_batch_size} (Global.global_batch_size). Choose a smaller batch "
                "(-o Global.local_batch_size=N), or count steps (-o Engine.run_mode=step "
                "-o Engine.max_steps=N)"
            )
        return cls(
            min(engine.max_steps, engine.num_train_epochs * steps_per_epoch),
            (engine.eval_freq or 0) * steps_per_epoch,
            (engine.save_load.save_epoch or 0) * steps_per_epoch or engine.save_load.save_steps or 0,
            steps_per_epoch,
        )

    def position(self, steps_done: float) -> tuple[int, int]:
        """Return (epoch, index of the step within the epoch), both from 0, for the step after
        ``steps_done`` steps."""
        if math.isinf(self.steps_per_epoch):
            return 0, int(steps_done)
        epoch = int(steps_done // self.steps_per_epoch)
        return epoch, int(steps_done - epoch * self.steps_per_epoch)

    def will_reach(self, state: TrainState, batch: BatchPlan, epoch: int, step: int) -> bool:
        """Return whether a run that continues from ``state`` will complete optimizer step ``step`` in epoch
        ``epoch``. Only then can the run save a checkpoint with this epoch and step in its name."""
        if not state.step < step <= self.max_steps:
            return False
        samples = batch.consumed_after(step - state.step, state.consumed_samples)
        return self.position((samples - state.data_start) / batch.global_batch_size)[0] == epoch
