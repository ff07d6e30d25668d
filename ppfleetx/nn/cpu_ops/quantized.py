"""Optional C++ operators for weights of 8 and 4 bits on a CPU. They are used if they have been compiled
(``python -m ppfleetx.nn.cpu_ops``).

A panel is a block of :data:`WIDTH` adjacent columns.
"""

from __future__ import annotations

from functools import partial

import paddle
from paddle import _C_ops

from ppfleetx.nn.cpu_ops import ops
from ppfleetx.nn.cpu_ops.compiled import WIDTH

BLOCK = 8
"""The number of input features that the operators read at once. Group sizes must be multiples of this
number."""
MOST_INPUTS = 65536
"""The largest number of input features for which sums of 8-bit products cannot overflow 32 bits."""
are_available = partial(ops.load, "quantized")


def int8_panels(levels: paddle.Tensor) -> paddle.Tensor:
    """Arrange the 8-bit integers ``[in, out]`` of a weight in panels of columns,
    ``[panels, in, panel width]``. ``in`` is padded with zeros to a multiple of :data:`BLOCK`."""
    filled = _fill(levels, BLOCK)
    return filled.reshape([filled.shape[0], -1, WIDTH]).transpose([1, 0, 2])


def int4_panels(packed: paddle.Tensor) -> paddle.Tensor:
    """Arrange the packed 4-bit integers of a weight, ``[in / 2, out]`` uint8, in panels of columns,
    ``[panels, in / 8, panel width, 4]``. The 4 bytes of the last dimension hold 8 successive integers of a
    column."""
    return _fill(packed, 4).reshape([packed.shape[0] // 4, 4, -1, WIDTH]).transpose([2, 0, 3, 1])


def int8_quads(levels: paddle.Tensor) -> paddle.Tensor:
    """Arrange the 8-bit integers ``[in, out]`` of a weight in panels of columns,
    ``[panels, in / 4, panel width, 4]``, padded with zeros. The last dimension holds 4 successive integers of
    a column."""
    quads = -(-levels.shape[0] // 4)
    return _fill(levels, 4).reshape([quads, 4, -1, WIDTH]).transpose([2, 0, 3, 1])


def scale_panels(scales: paddle.Tensor) -> paddle.Tensor:
    """Arrange the scales ``[groups, out]`` of a weight in panels of columns,
    ``[panels, groups, panel width]``. If the quantization is asymmetric, ``scales`` also contains the
    offsets, so both have ``2 * groups`` instead of ``groups``."""
    return _fill(scales, 1).reshape([scales.shape[0], -1, WIDTH]).transpose([1, 0, 2])


def product(
    kind: str,
    x: paddle.Tensor,
    panels: paddle.Tensor,
    scales: paddle.Tensor,
    bias: paddle.Tensor | None,
    columns: int,
) -> paddle.Tensor:
    """Return ``x [..., in] @ (integers * scales [+ offsets]) + bias``, without gradients.

    Args:
        kind: the type of the weights, ``int8`` or ``int4``; with ``int8_int8`` or ``int4_int8``, ``x`` is
            also rounded to 8 bits.
        x: float32 on CPU.
        panels: result of :func:`int8_panels` (``int8``), :func:`int8_quads` (``int8_int8``) or
            :func:`int4_panels`.
        scales: result of :func:`scale_panels`.
        bias: ``[out]``; None: no bias.
    """
    # The result differs from a float64 result by at most 2e-6 of ``|x| @ |dequantized weight|``.
    return _C_ops._run_custom_op(f"ppfleetx_{kind}", x, panels, scales, bias, columns)[0]


def _fill(matrix: paddle.Tensor, multiple: int) -> paddle.Tensor:
    """Pad ``matrix`` with zeros to a multiple of ``multiple`` rows and a multiple of :data:`WIDTH`
    columns."""
    rows, columns = matrix.shape
    below, right = -rows % multiple, -columns % WIDTH
    if not below and not right:
        return matrix
    dtype = matrix.dtype
    if dtype == paddle.uint8:  # exported programs of Paddle 3.3.1 cannot concatenate uint8
        matrix = paddle.cast(matrix, "int16")
    if below:
        matrix = paddle.concat([matrix, paddle.zeros([below, columns], dtype=matrix.dtype)], axis=0)
    if right:
        matrix = paddle.concat([matrix, paddle.zeros([rows + below, right], dtype=matrix.dtype)], axis=1)
    return paddle.cast(matrix, dtype) if dtype == paddle.uint8 else matrix
