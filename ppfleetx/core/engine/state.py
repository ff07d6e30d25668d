"""Where a run stands: what a checkpoint must carry beside tensors to continue exactly."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class TrainState:
    """Progress of a run, counted in whole optimizer steps.

    Attributes:
        step: optimizer steps done.
        consumed_samples: samples of the training order already used.
        epoch: completed passes over the training split.
    """

    step: int = 0
    consumed_samples: int = 0
    epoch: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrainState:
        return cls(step=data["step"], consumed_samples=data["consumed_samples"], epoch=data["epoch"])
