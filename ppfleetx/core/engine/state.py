"""Where a run stands: what a checkpoint must carry beside tensors to continue exactly."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class TrainState:
    """Progress of a run, counted in whole steps.

    Attributes:
        step: steps done, skipped ones included.
        consumed_samples: samples of the training order already used.
        epoch: completed passes over the training split.
        evaluated_step: step of the last whole evaluation; an evaluation that a stop cut short is made up for
            when the run goes on.
        skipped_steps: steps whose gradients overflowed: their samples are used, but neither weights nor
            learning rate moved.
        best: the highest value of what ``Engine.save_load.keep_best`` judges by; None before the first.
        best_step: when that was.
    """

    step: int = 0
    consumed_samples: int = 0
    epoch: int = 0
    skipped_steps: int = 0
    evaluated_step: int = -1
    best: float | None = None
    best_step: int = -1

    @property
    def schedule_step(self) -> int:
        """Steps that were taken: what learning rate and weight decay are functions of."""
        return self.step - self.skipped_steps

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrainState:
        return cls(
            step=data["step"],
            consumed_samples=data["consumed_samples"],
            epoch=data["epoch"],
            skipped_steps=data.get("skipped_steps", 0),
            evaluated_step=data.get("evaluated_step", data["step"]),
            best=data.get("best"),
            best_step=data.get("best_step", -1),
        )
