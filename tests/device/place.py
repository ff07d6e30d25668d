"""Which device the tests run on: the reference device, or the cards that are there."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from typing import Any

from tests.device import reference

REFERENCE = "reference"
DEVICE = "PPFLEETX_TEST_DEVICE"
"""What ``pytest --device NAME`` leaves for the modules of the tests, which are read before any fixture."""
CARDS = "PPFLEETX_TEST_CARDS"
"""So many cards, if not all that are visible (``pytest --cards N``); of the reference device 4."""
SIZES = (1, 2, 4, 8)

DETERMINISTIC = {"FLAGS_cudnn_deterministic": True, "FLAGS_embedding_deterministic": 1}
"""What a GPU build needs for the same bits twice; other builds lack these flags, and need none."""


def deterministic(device: str) -> dict[str, Any]:
    """:data:`DETERMINISTIC` as overrides of a run on ``device``."""
    if device != "gpu":
        return {}
    return {f"Global.flags.{name}": value for name, value in DETERMINISTIC.items()}


@dataclass(frozen=True)
class Place:
    """What the tests run on.

    Attributes:
        device: its name, for ``Global.device``.
        cards: how many there are.
        is_reference: whether it is the reference device.
        is_short: whether a few of the many plans are enough: nobody asked for these tests in particular.
        obstacle: why no test can run; "": they can.
        environment: of processes that use it.
    """

    device: str
    cards: int
    is_reference: bool = False
    is_short: bool = False
    obstacle: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def has_gpu(self) -> bool:
        """Whether this is one of NVIDIA's cards."""
        return self.device == "gpu"

    def sizes(self, start: int = 1) -> list[int]:
        """Numbers of ranks to run plans on."""
        most = min(self.cards, 2) if self.is_short else self.cards
        return [size for size in SIZES if start <= size <= max(most, 1)]


@functools.cache
def place() -> Place:
    """Look once. Paddle is imported only where real cards are asked for."""
    wanted, cards = os.environ.get(DEVICE, ""), int(os.environ.get(CARDS, "0"))
    if wanted in ("", REFERENCE):
        found = reference.obstacle()
        environment = {} if found else reference.environment()
        return Place(reference.NAME, cards or 4, True, not wanted, found, environment)
    import paddle

    from ppfleetx.distributed import device

    there = device.count(wanted)
    if not there:
        return Place(wanted, 0, obstacle=f"this Paddle, {paddle.version.full_version}, sees no {wanted}")
    return Place(wanted, min(there, cards or there))
