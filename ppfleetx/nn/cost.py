"""The types in which all declarations state the costs of layers: operations and steps of a tape. No Paddle.

A multiply-add counts as two operations. Attention counts all pairs of positions, as the Megatron papers do
and as a kernel without causal skipping computes them; fused attention skips the upper half.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ppfleetx.nn.tape import Step

Kernels = Literal["cpu", "gpu", "plugin", "fused"]
"""The kinds of operations to count:

``cpu`` ours on a CPU, in float32. ``gpu`` ours on a GPU: reference attention, or flash attention where the
work says so. ``plugin`` ours on the device of a plugin (Ascend): as on a GPU, but the tensor-parallel loss is
composed. ``fused`` those of Megatron-LM and PaddleFleetX: scale, mask and softmax in one kernel that keeps
the 16-bit
           result. For published runs.
"""
Recompute = Literal["none", "core_attn", "full_attn", "full"]
Kind = Literal["matmul", "scores", "flash", "elementwise"]
Part = Literal["attention", "core", "mlp", "edge"]
_REPEATED: dict[str, tuple[Part, ...]] = {
    "none": (),
    "core_attn": ("core",),
    "full_attn": ("core", "attention"),
    "full": ("core", "attention", "mlp"),
}


@dataclass(frozen=True)
class Work:
    """One micro batch on one rank: everything that the cost of a layer depends on besides its declaration.

    Attributes:
        micro_batch: sequences.
        seq_len: tokens of a sequence, over all context-parallel ranks.
        mp, sep, sequence_parallel: the slicing of layers and positions.
        activation_bytes, parameter_bytes, gradient_bytes: bytes of one number of each kind.
        kernels: the kind of operations to count, see :data:`Kernels`.
        flash: whether attention is fused.
        ep, emp: number of ranks that divide the experts of a layer, and that slice each expert; None: ``mp``.
        imbalance: the most rows that the experts of one rank get, divided by the mean of all ranks.
    """

    micro_batch: int
    seq_len: int
    mp: int
    sep: int
    sequence_parallel: bool
    activation_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    kernels: Kernels
    flash: bool
    ep: int = 1
    emp: int | None = None
    imbalance: float = 1.0

    @cached_property
    def tokens(self) -> float:
        """Tokens on this rank, before sequence parallelism slices them."""
        return self.micro_batch * self.seq_len / self.sep

    @property
    def split(self) -> int:
        """The number of parts sequence parallelism divides the positions into."""
        return self.mp if self.sequence_parallel else 1

    @property
    def on_cpu(self) -> bool:
        return self.kernels == "cpu"

    @property
    def fused(self) -> bool:
        return self.kernels == "fused"

    @property
    def low_share(self) -> float:
        """The size of an incoming gradient, as a share of the size in which it is kept; 0 if it is kept
        unchanged."""
        same = self.gradient_bytes == self.parameter_bytes
        return 0.0 if same else self.parameter_bytes / self.gradient_bytes

    def bytes_of(self, width: float) -> float:
        """Bytes of activations ``[tokens, width]``."""
        return self.tokens * width * self.activation_bytes

    def part_of(self, width: float) -> float:
        """Bytes of activations at this rank's share of the positions under sequence parallelism."""
        return self.bytes_of(width) / self.split


@dataclass(frozen=True)
class Operation:
    """One operation of a forward pass, and its costs in both passes.

    Attributes:
        kind: ``matmul`` of weights, ``scores`` (batched product of activations), ``flash``, ``elementwise``.
        part: part of the block that recomputation repeats as a whole; ``core`` is within ``attention``.
        flops: floating-point operations of the forward pass; the backward pass takes twice as many (2.5 times
            as many with flash, which computes the scores again).
        num_bytes: bytes read and written in the forward pass, without the operands of a product.
        backward_bytes: the same in the backward pass.
        kernels: number of kernel launches in the forward pass.
        narrowest: smallest dimension of a product with weights; 0 for other operations.
        operands: elements of input and output of a product with weights, which the weight's gradient needs.
    """

    name: str
    kind: Kind
    part: Part
    flops: float = 0.0
    num_bytes: float = 0.0
    backward_bytes: float = 0.0
    kernels: int = 1
    narrowest: float = 0.0
    operands: float = 0.0

    @property
    def backward_flops(self) -> float:
        return self.flops * (2.5 if self.kind == "flash" else 2.0)

    def is_repeated(self, recompute: Recompute) -> bool:
        """Whether the backward pass repeats this operation under the given recompute granularity."""
        return self.part in _REPEATED[recompute]


def matmul(name: str, part: Part, rows: float, width_in: float, width_out: float) -> Operation:
    """The product of ``[rows, width_in]`` and a weight ``[width_in, width_out]``."""
    return Operation(
        name,
        "matmul",
        part,
        flops=2 * rows * width_in * width_out,
        narrowest=min(rows, width_in, width_out),
        operands=rows * (width_in + width_out),
    )


def elementwise(name: str, part: Part, forward: float, backward: float, kernels: int = 1) -> Operation:
    """An operation that costs the bytes it reads and writes."""
    return Operation(name, "elementwise", part, 0.0, forward, backward, kernels)


def residual(name: str, part: Part, work: Work, width: int, dropout: float) -> Operation:
    """Dropout of a branch and its addition to the residual: two inputs, the sum, and one byte of mask per
    element."""
    values = work.tokens * width / work.split
    e, mask = work.activation_bytes, int(dropout > 0)
    return elementwise(name, part, values * (3 * e + mask), values * (2 * e + mask), 1 + mask)


def dropout_step(work: Work, writes: str, reads: str, size: float, probability: float) -> Step:
    """Dropout of a tensor of ``size`` bytes; it keeps one byte per element."""
    if probability == 0:
        return Step(writes, size, (reads,), view=True)
    return Step(writes, size, (reads,), extra=size / work.activation_bytes)
