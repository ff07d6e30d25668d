"""Matrix products in bfloat16 on a CPU with AVX512-BF16 or AMX, by the oneDNN library in Paddle's wheel.
Operands are rounded to bfloat16; sums and results are float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import paddle
from paddle import _C_ops

from ppfleetx.nn.cpu_ops import ops

are_available = partial(ops.load, "bfloat16")
_entered = False


@contextmanager
def products() -> Iterator[None]:
    """Context manager in which layers compute products with weights in bfloat16 (:func:`matmul`), like
    ``auto_cast`` on a GPU. Backward passes use the same kind of product as their forward passes."""
    global _entered
    before, _entered = _entered, True
    try:
        yield
    finally:
        _entered = before


def are_active() -> bool:
    """Return whether layers compute products with weights in bfloat16, that is, inside :func:`products`."""
    return _entered


def matmul(
    x: paddle.Tensor,
    y: paddle.Tensor,
    bias: paddle.Tensor | None = None,
    *,
    transpose_x: bool = False,
    transpose_y: bool = False,
) -> paddle.Tensor:
    """Return ``x @ y + bias`` in float32, without gradients.

    Args:
        x: ``[..., m, k]`` float32 or bfloat16; ``[..., k, m]`` with ``transpose_x``.
        y: ``[..., k, n]`` with the leading dimensions of ``x``, or ``[k, n]``; with ``transpose_y``, the last
            two dimensions are swapped.
        bias: ``[n]`` float32.
    """
    return _C_ops._run_custom_op("ppfleetx_bfloat16_matmul", x, y, bias, transpose_x, transpose_y)[0]


def cast(x: paddle.Tensor) -> paddle.Tensor:
    """Round ``x`` to the nearest bfloat16 values; a bfloat16 ``x`` is returned unchanged."""
    if x.dtype == paddle.bfloat16:
        return x
    return _C_ops._run_custom_op("ppfleetx_bfloat16_cast", x.detach())[0]


def cast_and_sum(x: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return float32 ``x [..., n]`` rounded to bfloat16, and its column sums ``[n]`` before rounding."""
    low, sums = _C_ops._run_custom_op("ppfleetx_bfloat16_cast_and_sum", x.detach())
    return low, sums
