"""Matmuls and attention in bfloat16 on a CPU with AVX512-BF16 or AMX. They use the oneDNN library in
Paddle's wheel. Operands are rounded to bfloat16; sums and results are float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import paddle
from paddle import _C_ops

from ppfleetx.distributed.device import on_card
from ppfleetx.nn.cpu_ops import ops
from ppfleetx.nn.cpu_ops.compiled import NOT_COMPILED
from ppfleetx.utils.device_support import cpu_obstacle

are_available = partial(ops.load, "bfloat16")
_entered = False


def serves(dtype: str) -> bool:
    """Return whether the device is a CPU on which the operators of this module can compute in ``dtype``."""
    return not on_card() and obstacle(dtype) is None


def obstacle(dtype: str) -> str | None:
    """Return why the operators of this module cannot compute in ``dtype`` on this CPU; None if they can."""
    return cpu_obstacle(dtype) or (None if are_available() else f"its {NOT_COMPILED}")


@contextmanager
def autocast() -> Iterator[None]:
    """Context manager in which layers compute matmuls with weights (:func:`matmul`) and attention
    (:func:`attention`) in bfloat16, like ``auto_cast`` on a GPU. Backward passes inside it also use
    bfloat16."""
    global _entered
    before, _entered = _entered, True
    try:
        yield
    finally:
        _entered = before


def in_autocast() -> bool:
    """Return whether this code runs inside :func:`autocast`."""
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
    """Return float32 ``x [..., n]`` rounded to bfloat16, and the column sums ``[n]`` of the unrounded
    ``x``."""
    low, sums = _C_ops._run_custom_op("ppfleetx_bfloat16_cast_and_sum", x.detach())
    return low, sums


def attention(
    query: paddle.Tensor, key: paddle.Tensor, value: paddle.Tensor, document_start: paddle.Tensor | None
) -> paddle.Tensor:
    """Compute differentiable causal attention. The operands of matmuls are rounded to bfloat16;
    scores, softmax and results are float32.

    Args:
        query: ``[b, key/value heads, query heads per key/value head, s, head size]`` float32.
        key, value: ``[b, key/value heads, s, head size]`` float32; values can have another head size.
        document_start: ``[b, s]``, the first position that each position may attend to; None: no limit.
    """
    start = None if document_start is None else document_start.astype("int32")
    scale = query.shape[-1] ** -0.5
    return ops.with_gradient("ppfleetx_bfloat16_attention", query, key, value, start, scale)
