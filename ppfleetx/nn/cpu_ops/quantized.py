"""Our own C++ operators for weights of 8 and 4 bits on a CPU, used if they have been compiled
(``python -m ppfleetx.nn.cpu_ops``).

Decoding reads every weight once per token, so fewer bytes are faster. Weights are widened to float32 in
registers; with 8-bit activations, products are summed as integers (by ``vpdpbusd`` if the CPU has it).
``quantized.cc`` has the details.

Asymmetric scales are float16 ``[2 g, n]``, with scale and offset of each group alternating. The product then
adds ``offset * sum(x)`` for each group.

Shape letters: k input features, n output features, g groups of input features, p panels of w columns. Results
differ from ``x @ dequantized + bias`` in float64 by at most 2e-6 of ``|x| @ |dequantized|``.
"""

from __future__ import annotations

from functools import partial

import paddle
from paddle import _C_ops

from ppfleetx.nn.cpu_ops import ops
from ppfleetx.nn.cpu_ops.ops import WIDTH

BLOCK = 8
"""Number of input features that are read at once. Group sizes are multiples of it."""
MOST_INPUTS = 65536
"""The most input features for which sums of 8-bit products cannot overflow 32 bits."""
are_available = partial(ops.load, "quantized")


def int8_panels(levels: paddle.Tensor) -> paddle.Tensor:
    """Arrange integers ``[k, n]`` int8 in panels ``[p, k8, w]``, where k8 is k padded with zeros to a
    multiple of :data:`BLOCK`."""
    filled = _fill(levels, BLOCK)
    return filled.reshape([filled.shape[0], -1, WIDTH]).transpose([1, 0, 2])


def int4_panels(packed: paddle.Tensor) -> paddle.Tensor:
    """Arrange packed pairs of integers ``[k / 2, n]`` uint8 as ``[p, k / 8, w, 4]``: 4 bytes hold 8 integers
    of a column."""
    return _fill(packed, 4).reshape([packed.shape[0] // 4, 4, -1, WIDTH]).transpose([2, 0, 3, 1])


def int8_quads(levels: paddle.Tensor) -> paddle.Tensor:
    """Arrange integers ``[k, n]`` int8 as ``[p, k / 4, w, 4]``, padded with zeros: 4 integers of a column are
    adjacent."""
    quads = -(-levels.shape[0] // 4)
    return _fill(levels, 4).reshape([quads, 4, -1, WIDTH]).transpose([2, 0, 3, 1])


def scale_panels(scales: paddle.Tensor) -> paddle.Tensor:
    """Arrange ``scales [g, n]`` (or ``[2 g, n]``) as ``[p, g, w]`` (or ``[p, 2 g, w]``)."""
    return _fill(scales, 1).reshape([scales.shape[0], -1, WIDTH]).transpose([1, 0, 2])


def product(
    kind: str,
    x: paddle.Tensor,
    panels: paddle.Tensor,
    scales: paddle.Tensor,
    bias: paddle.Tensor | None,
    columns: int,
) -> paddle.Tensor:
    """Return ``x [..., k] @ (levels * scales [+ offsets]) + bias``, without gradients.

    Args:
        kind: ``int8`` or ``int4``, the type of the weights; ``int8_int8`` or ``int4_int8`` also rounds ``x``
            to 8 bits, with one scale per row and group of ``scales``. A row with NaN or infinity gives NaN.
        x: float32 on CPU.
        panels: result of :func:`int8_panels` (``int8``), :func:`int8_quads` (``int8_int8``) or
            :func:`int4_panels`.
        scales: result of :func:`scale_panels`.
        bias: ``[n]`` or None.
        columns: n.
    """
    return _C_ops._run_custom_op(f"ppfleetx_{kind}", x, panels, scales, bias, columns)[0]


def _fill(matrix: paddle.Tensor, multiple: int) -> paddle.Tensor:
    """Pad ``matrix`` with zeros at the bottom and on the right, to multiples of ``multiple`` and
    :data:`WIDTH`."""
    rows, columns = matrix.shape
    below, right = -rows % multiple, -columns % WIDTH
    if not below and not right:
        return matrix
    dtype = matrix.dtype
    if dtype == paddle.uint8:  # programs of Paddle 3.3.1 cannot concatenate it
        matrix = paddle.cast(matrix, "int16")
    if below:
        matrix = paddle.concat([matrix, paddle.zeros([below, columns], dtype=matrix.dtype)], axis=0)
    if right:
        matrix = paddle.concat([matrix, paddle.zeros([rows + below, right], dtype=matrix.dtype)], axis=1)
    return paddle.cast(matrix, dtype) if dtype == paddle.uint8 else matrix
