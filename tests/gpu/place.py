"""Where the GPU tests run: on the cards that are there, or, dry, on CPU ranks in their place."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

from ppfleetx.utils.devices import expected_device

DRY = "PPFLEETX_GPU_TESTS_ON_CPU"
"""Set to 1, CPU ranks stand for cards: what only a card can show is left out, everything else is run."""
CARDS = "PPFLEETX_GPU_TESTS_CARDS"
"""So many cards, if not all that are visible; of a dry run 2."""
SIZES = (1, 2, 4, 8)


DETERMINISTIC = {"FLAGS_cudnn_deterministic": True, "FLAGS_embedding_deterministic": 1}
"""What a GPU build needs for the same bits twice; builds for the CPU lack these flags, and need none."""


def deterministic(device: str) -> dict[str, Any]:
    """:data:`DETERMINISTIC` as overrides of a run on ``device``."""
    if device != "gpu":
        return {}
    return {f"Global.flags.{name}": value for name, value in DETERMINISTIC.items()}


@dataclass(frozen=True)
class Place:
    """What the tests run on.

    Attributes:
        device: ``gpu`` or ``cpu``.
        cards: how many there are, or stand for them.
        obstacle: why no test can run; "": they can.
    """

    device: str
    cards: int
    obstacle: str = ""

    @property
    def has_gpu(self) -> bool:
        """Whether this is no dry run."""
        return self.device == "gpu"

    def sizes(self, start: int = 1) -> list[int]:
        """Numbers of ranks to run plans on."""
        return [size for size in SIZES if start <= size <= max(self.cards, 1)]


@functools.cache
def place() -> Place:
    """Look once. Paddle is imported only where its build for GPUs is installed."""
    wanted = int(os.environ.get(CARDS, "0"))
    if os.environ.get(DRY) == "1":
        return Place("cpu", wanted or 2)
    if expected_device("auto") != "gpu":
        return Place("gpu", 0, "no GPU: the Paddle installed here is compiled without CUDA")
    import paddle

    count = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    if not count:
        return Place("gpu", 0, "no GPU: Paddle is compiled with CUDA, but 0 devices are visible")
    return Place("gpu", min(count, wanted or count))
