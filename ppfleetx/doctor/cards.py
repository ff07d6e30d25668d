"""The cards that Paddle sees."""

from __future__ import annotations


def visible_cards() -> int:
    """How many there are for the installed Paddle, which this imports; none for a build for CPUs."""
    import paddle

    return paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
