"""Where a run stands: what a checkpoint must carry beside tensors to continue exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ppfleetx.config.errors import CheckpointError, shown


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
