"""Matmuls in an exported program: one operation for each, or one for all transformer blocks of a quantized
model.

A matrix can be stored in *panels*, groups of adjacent columns. On a CPU, a matmul of 2 to 16 rows with a
matrix in panels has the same result as with the original matrix, and is about 1.5 times as fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
import paddle.nn.functional as F
from paddle import nn

from ppfleetx.generation.fused_blocks import FusedBlocks, Operands, can_fuse, linears_of
from ppfleetx.nn.cpu_ops import fused_blocks
from ppfleetx.nn.cpu_ops import ops as cpu_ops
from ppfleetx.nn.layers import Linear, add_smaller
from ppfleetx.nn.panel_matmul import WIDTH, panels_of, times_panels
from ppfleetx.nn.quantized import QuantizedLinear, QuantizedMatrix


class Matrix:
    """A weight matrix, as a constant of an exported program.

    Attributes:
        weight: [inputs, outputs].
        panels: a copy of ``weight`` in groups of columns, for faster matmuls; None: matmuls use ``weight``.
        single_axis: the axis of the activations that has size 1. Only used with panels.
        by_cpu_ops: whether matmuls with panels use our C++ operator.
    """

    def __init__(self, weight: paddle.Tensor) -> None:
        self.weight, self.by_cpu_ops = weight, False
        self.panels: paddle.Tensor | None = None
        self.single_axis = 0

    def begin(self) -> None:
        """Add operations to the program that prepare the weights, such as dequantization in a subclass. Call
        it at the beginning of the program, outside of conditionals and loops."""

    def make_panels(self) -> paddle.Tensor:
        return panels_of(self.weight)

    def linear(self, x: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
        """Compute ``x @ weight + bias``. If :attr:`panels` is set, ``x`` must be 2-D, or 3-D with size 1 in
        the axis :attr:`single_axis`."""
        if self.panels is None:
            return F.linear(x, self.weight, bias)
        columns = self.weight.shape[1]
        if self.by_cpu_ops:  # for any number of rows, although MKL is up to 10% faster from 64 rows on
            return cpu_ops.few_rows(x, self.panels, bias, columns)
        rows = x.squeeze(self.single_axis) if x.ndim == 3 else x
        # MKL would repack the original matrix, which costs as much as reading it again. For a single row, the
        # original matrix is faster than panels.
        product = times_panels(rows, self.panels)
        if columns % WIDTH:
            product = product[:, :columns]
        if bias is not None:
            product = add_smaller(product, bias)
        return product.unsqueeze(self.single_axis) if x.ndim == 3 else product


class QuantizedProgramMatrix(Matrix):
    """A quantized weight matrix, as a constant of an exported program. In a program with our C++ operators,
    the matrix stays quantized. Otherwise it is dequantized when the program is loaded."""

    def __init__(self, stored: QuantizedMatrix) -> None:
        super().__init__(stored.weight)
        self.stored = stored
        self.as_stored: tuple[paddle.Tensor, paddle.Tensor] | None = None

    def begin(self) -> None:
        if self.by_cpu_ops:
            self.as_stored = self.stored.make_panels()
        else:
            self.weight = self.stored.widened()

    def make_panels(self) -> paddle.Tensor:
        return self.as_stored[0] if self.by_cpu_ops else super().make_panels()

    def linear(self, x: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
        if self.by_cpu_ops:
            return self.stored.multiply_panels(x, self.as_stored, bias)
        if not self.stored.rounds_activations:
            return super().linear(x, bias)
        return self.stored.rescaled(super().linear, x, bias)


class ProgramLinear(nn.Layer):
    """An exportable replacement for a linear layer, quantized or not, with the same parameters."""

    def __init__(self, linear: Linear | QuantizedLinear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        if isinstance(linear, QuantizedLinear):
            self.scale = linear.scale
            self.matrix = QuantizedProgramMatrix(linear.matrix)
        else:
            self.matrix = Matrix(linear.weight)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.matrix.linear(x, self.bias)


@paddle.jit.not_to_static
def begin(matrices: Sequence[Matrix]) -> None:
    for matrix in matrices:
        matrix.begin()


@paddle.jit.not_to_static
def use_panels(matrices: Sequence[Matrix], panels: Sequence[paddle.Tensor], single_axis: int = 0) -> None:
    """Set the weight layout for later matmuls with ``matrices``: groups of columns, or the original matrices.
    Matmuls that are already in the program do not change.

    Args:
        panels: copies of the matrices in groups of columns, from :meth:`Matrix.make_panels`. If empty, the
            original matrices are used.
        single_axis: the axis of size 1 in the activations [positions, sequences, inputs]. Only used with
            panels.
    """
    # `single_axis` is 0 for one position of many sequences, 1 for many positions of one sequence.
    for matrix, own in zip(matrices, panels or [None] * len(matrices), strict=True):
        matrix.panels, matrix.single_axis = own, single_axis


def matrices_of(model: nn.Layer) -> list[Matrix]:
    """Replace the linear layers of ``model`` by exportable ones, and return their matrices. Layers with
    adapters or hooks are not replaced.
    """
    matrices = []
    for parent in model.sublayers(include_self=True):
        for name, child in parent.named_children():
            is_plain = (
                isinstance(child, Linear | QuantizedLinear)
                and not child.sublayers()
                and not child._forward_post_hooks
            )
            if is_plain:
                replacement = ProgramLinear(child)
                setattr(parent, name, replacement)
                matrices.append(replacement.matrix)
    return matrices


def program_blocks(layers: Sequence[nn.Layer]) -> FusedBlocks | None:
    """Combine ``layers``, the transformer blocks and the final norm, into one C++ operation. Returns None
    if this operation is not compiled or does not support the layers, for example because they are not
    quantized."""
    if not fused_blocks.all_are_available() or not can_fuse(layers):
        return None
    linears = [linear for block in layers[:-1] for linear in linears_of(block)]
    matrices = [getattr(linear, "matrix", None) for linear in linears]
    return FusedBlocks(layers) if all(isinstance(one, QuantizedProgramMatrix) for one in matrices) else None


@paddle.jit.not_to_static
def make_weights(blocks: FusedBlocks | None) -> fused_blocks.BlockWeights | None:
    """Add to the program the operations that convert the weights of ``blocks`` to the layout of the C++
    operation. Call this after :func:`begin`, outside of conditionals and loops. Returns None if ``blocks`` is
    None."""
    return None if blocks is None else blocks.make_weights(_operands)


def _operands(linear: ProgramLinear) -> Operands:
    return linear.matrix.stored.panel_format, *linear.matrix.as_stored
