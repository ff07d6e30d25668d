"""The rates of a run on its device."""

from __future__ import annotations

from functools import lru_cache

from ppfleetx.config.sections.root import RunConfig
from ppfleetx.distributed.device import is_card, total_memory
from ppfleetx.planner.utilization import Utilization, run_utilization


def device_utilization(cfg: RunConfig, device: str) -> Utilization | None:
    """What TFLOP/s and MFU of the run are counted with; None where a step's operations are not known."""
    return _of(_ById(cfg), device)


class _ById:
    """Hashes a configuration by its identity, so that a cache can be keyed by it at every log line."""

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg = cfg

    def __hash__(self) -> int:
        return id(self.cfg)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.cfg is other.cfg


@lru_cache(maxsize=2)
def _of(by_id: _ById, device: str) -> Utilization | None:
    return run_utilization(by_id.cfg, device, device_name(device))


def device_name(device: str) -> str:
    """What the driver calls the card of this process; "" where Paddle does not say."""
    found = total_memory() if is_card(device) else None
    return "" if found is None else found[1]
