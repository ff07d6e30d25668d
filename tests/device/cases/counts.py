"""In a rank: what the device itself counts of a step."""

from __future__ import annotations

from typing import Any

import paddle

from tests.device.cases.training import engine_steps
from tests.device.reference import NAME, Device
from tests.parity.training import build

_COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *("send", "recv"),
)


def step(plan: dict[str, Any], world_size: int, extra: dict[str, Any]) -> dict[str, int]:
    """Launches, waits of the host, copies and collectives of the third step of a run, what the engine
    exchanges before it included."""
    with paddle.utils.unique_name.guard():
        given = {"Global.device": NAME, "Distributed.bucket_size": 64, **extra}
        cfg, ctx, runner = build(plan, world_size, "gpt", "adamw", 4, given)
        take, device = engine_steps(cfg, ctx, runner), Device()
        for number in range(3):
            paddle.device.synchronize()
            device.clear()
            take(number)
            counters = {name: times for name, (times, _) in device.counters().items()}

    def total(*beginnings: str) -> int:
        return sum(times for name, times in counters.items() if name.startswith(beginnings))

    return {
        "launches": total("kernel"),
        "waits": total("wait: "),
        "blocking copies": total("blocking copy: "),
        "queued copies": total("copy: "),
        "collectives": sum(counters.get(name, 0) for name in _COLLECTIVES),
    }
