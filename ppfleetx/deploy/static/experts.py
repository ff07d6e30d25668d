"""Expert layers (MoE) in an exported program. A row is the hidden state of one token for one of its experts.
Rows are sorted by expert."""

from __future__ import annotations

import paddle
from paddle import _C_ops, nn

from ppfleetx.nn.cpu_ops import ops as cpu_ops
from ppfleetx.nn.layers import GroupedLinear
from ppfleetx.nn.lora import LoraBranch
from ppfleetx.nn.moe import MoE
from ppfleetx.nn.quantized import QuantizedGroupedLinear, QuantizedMatrix, round_rows
from ppfleetx.nn.token_dispatcher import RoundTrip, TokenDispatcher


class GroupedMatrix:
    """One weight matrix for each expert, such as those of ``fc1``, as constants of an exported program.

    Attributes:
        weight: [experts, inputs, outputs].
        stored: the quantized layer with these matrices; None if the model is not quantized.
        by_cpu_ops: whether our C++ operator computes the matmuls.
    """

    def __init__(self, weight: paddle.Tensor, stored: QuantizedGroupedLinear | None = None) -> None:
        self.weight, self.stored, self.by_cpu_ops = weight, stored, False

    def begin(self) -> None:
        """Add to the program the operations that dequantize the experts' matrices. Call it at the beginning
        of the program, outside of conditionals and loops."""
        if self.stored is not None:
            weight, scale, form = self.stored.weight, self.stored.scale, self.stored.form
            experts = range(weight.shape[0])
            matrices = [QuantizedMatrix(weight[expert], scale[expert], form) for expert in experts]
            self.weight = paddle.stack([matrix.widened() for matrix in matrices])

    def linear(
        self, x: paddle.Tensor, counts: paddle.Tensor, bias: paddle.Tensor | None = None
    ) -> paddle.Tensor:
        """Multiply each row of ``x`` by the matrix of its expert, and add the expert's bias. ``x`` is
        [rows, inputs], sorted by expert, and the result is [rows, outputs]. ``counts`` has the number of rows
        of each expert. ``bias`` is [experts, outputs]."""
        stored = self.stored
        if stored is not None and stored.form.activation_bits is not None:
            integers, step = round_rows(x)
            product = self._multiply(integers, counts)
            product = product * step * _repeat_for_rows(stored.scale.squeeze(1), counts, x.shape[0])
        else:
            product = self._multiply(x, counts)
        return product if bias is None else product + _repeat_for_rows(bias, counts, x.shape[0])

    def _multiply(self, x: paddle.Tensor, counts: paddle.Tensor) -> paddle.Tensor:
        if self.by_cpu_ops:
            return cpu_ops.grouped_product(x, self.weight, counts)
        return grouped_product(x, self.weight, counts)


def _repeat_for_rows(values: paddle.Tensor, counts: paddle.Tensor, num_rows: int) -> paddle.Tensor:
    """Return ``values`` with row e repeated ``counts[e]`` times, like ``numpy.repeat``. ``values`` is
    [experts, outputs], and the result is [rows, outputs]. ``num_rows`` is the sum of ``counts``."""
    expert = paddle.searchsorted(counts.cumsum(0), paddle.arange(num_rows), right=True)
    return values.index_select(expert)


def grouped_product(x: paddle.Tensor, weight: paddle.Tensor, counts: paddle.Tensor) -> paddle.Tensor:
    """Multiply each row of ``x`` by the matrix of its expert.

    Args:
        x: [rows, inputs], the hidden states of tokens, sorted by expert.
        weight: [experts, inputs, outputs].
        counts: number of rows of each expert.

    Returns:
        [rows, outputs].
    """
    ends = counts.cumsum(0)
    used = paddle.nonzero(counts).flatten()
    product = paddle.zeros([x.shape[0], weight.shape[2]], x.dtype)
    done = paddle.zeros([], "int64")
    # Loop over the experts that have rows, so that only one matrix is copied at a time.
    while done < used.shape[0]:
        expert = used[done]
        end = ends[expert]
        begin = end - counts[expert]
        rows = paddle.matmul(x[begin:end], weight[expert])
        # In place. paddle.index_add_ copies in a static program.
        product = _C_ops.index_add_(product, paddle.arange(begin, end), rows, 0)
        done = done + 1
    return product


class ProgramGroupedLinear(nn.Layer):
    """An exportable replacement for a `GroupedLinear`, quantized or not, with the same parameters.
    ``matrices`` has the layer's weights and, if there is a LoRA adapter, the adapter's two matrices."""

    def __init__(self, linear: GroupedLinear | QuantizedGroupedLinear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        is_quantized = isinstance(linear, QuantizedGroupedLinear)
        if is_quantized:
            self.scale = linear.scale
        self.lora: LoraBranch | None = getattr(linear, "lora", None)
        self.matrices = [GroupedMatrix(self.weight, linear if is_quantized else None)]
        if self.lora is not None:
            self.matrices += [GroupedMatrix(self.lora.a), GroupedMatrix(self.lora.b)]

    def forward(self, x: paddle.Tensor, counts: paddle.Tensor, *, adds_bias: bool = True) -> paddle.Tensor:
        """Apply each expert's linear layer to the expert's rows of ``x``. ``x`` is [rows, inputs], sorted
        by expert, and the result is [rows, outputs]. ``counts`` has the number of rows of each expert.
        ``adds_bias`` says whether to add the biases."""
        matrix, *adapter = self.matrices
        product = matrix.linear(x, counts, self.bias if adds_bias else None)
        if adapter:
            low, high = adapter
            product = product + high.linear(low.linear(x, counts), counts) * self.lora.scale
        return product


class _CountsOnDevice(RoundTrip):
    def arrive(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        return self._rows, self._counts


class ProgramTokenDispatcher(TokenDispatcher):
    """The token dispatcher of an exported program. The program runs in one process, so hidden states are
    not sent to other ranks. The number of tokens per expert stays on the device."""

    def dispatch(self, rows: paddle.Tensor, counts: paddle.Tensor) -> RoundTrip:
        return _CountsOnDevice(rows, counts)


def grouped_matrices_of(model: nn.Layer) -> list[GroupedMatrix]:
    """Make the MoE layers of ``model`` exportable: replace their experts' linear layers and their token
    dispatchers. Returns the matrices of the new linear layers."""
    matrices = []
    for mixture in model.sublayers():
        if isinstance(mixture, MoE):
            mixture.exchange = ProgramTokenDispatcher()
            experts = mixture.experts
            experts.fc1, experts.fc2 = ProgramGroupedLinear(experts.fc1), ProgramGroupedLinear(experts.fc2)
            matrices += [*experts.fc1.matrices, *experts.fc2.matrices]
    return matrices
