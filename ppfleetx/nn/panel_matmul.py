"""Matmuls of a few rows with a large constant matrix on a CPU, as in decoding and for short prompts.

The matrix is stored in panels, that is, contiguous blocks of columns, so that MKL does not have to pack the
matrix for each matmul.
"""

from __future__ import annotations

import math

import paddle

from ppfleetx.nn.cpu_ops import ops as cpu_ops
from ppfleetx.nn.cpu_ops.compiled import WIDTH
from ppfleetx.nn.layers import Linear, add_smaller
from ppfleetx.utils.machine import available_fraction, back_by_huge_pages

# Panels are faster for 2 to 512 rows with AVX-512, and for 2 to 64 rows with AVX2.
MOST_ROWS = 512 if WIDTH == 48 else 64
_MEMORY_LEFT = 0.25  # panels are made only if more than this fraction of the machine's memory is available


def panels_of(weight: paddle.Tensor) -> paddle.Tensor:
    """Arrange ``weight [in, out]`` in panels of consecutive columns, ``[panels, in, panel width]``, padded
    with zeros."""
    rows, columns = weight.shape
    missing = -columns % WIDTH
    if missing:
        weight = paddle.concat([weight, paddle.zeros([rows, missing], dtype=weight.dtype)], axis=1)
    return weight.reshape([rows, -1, WIDTH]).transpose([1, 0, 2])


def times_panels(rows: paddle.Tensor, panels: paddle.Tensor) -> paddle.Tensor:
    """Multiply ``rows``, ``[count, in]`` or ``[1, count, in]``, by ``panels [panels, in, panel width]``.
    Return ``[count, panels * panel width]``."""
    return paddle.matmul(rows, panels).transpose([1, 0, 2]).flatten(1)


def use_huge_pages(tensor: paddle.Tensor) -> None:
    """Move the memory of a CPU tensor to huge pages, which makes reading it faster
    (:func:`~ppfleetx.utils.machine.back_by_huge_pages`). Do nothing on other devices."""
    if tensor.place.is_cpu_place():
        back_by_huge_pages(tensor.data_ptr(), tensor.size * tensor.element_size())


class PanelMatrix:
    """A constant matrix ``[in, out]`` on a CPU. It is copied into panels (:func:`panels_of`) at the first
    matmul that panels make faster."""

    def __init__(self, weight: paddle.Tensor) -> None:
        self.weight = weight
        self._panels: paddle.Tensor | None = None

    def linear(self, x: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
        """Return ``x [..., in] @ weight + bias``, without gradients."""
        num_rows, panels = math.prod(x.shape[:-1]), None
        if 1 < num_rows <= MOST_ROWS and x.dtype == paddle.float32:
            panels = self.panels() if paddle.in_dynamic_mode() and x.place.is_cpu_place() else None
        if panels is None:
            product = paddle.matmul(x, self.weight)
        elif num_rows <= cpu_ops.MOST_ROWS and cpu_ops.are_available():
            return cpu_ops.few_rows(x, panels, bias, self.weight.shape[1])
        else:
            # A decoding step, [1, b, in], needs no reshape.
            rows = x if x.ndim == 3 and x.shape[0] == 1 else x.reshape([-1, x.shape[-1]])
            product = times_panels(rows, panels).reshape([*x.shape[:-1], -1])
            if product.shape[-1] != self.weight.shape[1]:
                product = product[..., : self.weight.shape[1]]
        return product if bias is None else add_smaller(product, bias)

    def operands(self, num_rows: int) -> tuple[str, paddle.Tensor] | None:
        """Return the matrix in the format that the operator for fused blocks needs for ``num_rows`` rows:
        whole for one row, in panels for more rows. None: there is too little memory for panels.

        Returns:
            The name of the format (one of :data:`~ppfleetx.nn.cpu_ops.fused_blocks.FORMATS`) and the array.
        """
        if num_rows == 1:
            return "whole", self.weight
        panels = self.panels()
        return None if panels is None else ("panels", panels)

    def panels(self) -> paddle.Tensor | None:
        """Return the matrix in panels, made at the first call; None if there is too little memory."""
        if self._panels is None and available_fraction() > _MEMORY_LEFT:
            self._panels = panels_of(self.weight).contiguous()
            use_huge_pages(self._panels)
        return self._panels


class InferenceLinear(Linear):
    """A :class:`~ppfleetx.nn.layers.Linear` whose weight does not change after its first use.

    Attributes:
        matrix: the weight, for matmuls without gradients.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.matrix = PanelMatrix(self.weight)

    def use(self, weight: paddle.Tensor) -> None:
        """Make later passes without gradients use ``weight`` instead of the layer's own weight."""
        if self.matrix.weight is not weight:
            self.matrix = PanelMatrix(weight)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if not paddle.in_dynamic_mode() or paddle.is_grad_enabled():
            return super().forward(x)
        return self.matrix.linear(x, self.bias)
