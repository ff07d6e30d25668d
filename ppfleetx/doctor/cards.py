"""The cards that Paddle sees."""

from __future__ import annotations

_HALF = ("float16", "bfloat16")


def visible_cards() -> int:
    """How many there are for the installed Paddle, which this imports; none for a build for CPUs."""
    import paddle

    return paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0


def lacks(dtype: str) -> bool:
    """Whether this process's device does not compute in a type that a plan may name."""
    from ppfleetx.parallel.precision import has_kernels

    return dtype in _HALF and not has_kernels(dtype)
