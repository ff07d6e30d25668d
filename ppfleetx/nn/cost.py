"""Cost of layers: the sizes that cost depends on, and the operations of a forward pass. No Paddle.

A multiply-add counts as two operations. Attention counts all pairs of positions, as in the Megatron papers;
flash attention counts the causal half only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ppfleetx.nn.tape import Step

Kernels = Literal["cpu", "gpu", "plugin", "fused"]
"""The implementation whose operations are counted:

``cpu``: ours on a CPU, in float32.
``gpu``: ours on a GPU, with reference or flash attention (``Work.flash``).
``plugin``: ours on the device of a plugin (Ascend): as on a GPU, but with an unfused tensor-parallel loss.
``fused``: Megatron-LM and PaddleFleetX, to compare with published runs: scale, mask and softmax are one
kernel, which keeps the 16-bit result.
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
    """What the cost of a layer depends on besides its declaration: one micro batch on one rank.

    Attributes:
        micro_batch: number of sequences.
        seq_len: tokens per sequence, over all context-parallel ranks.
        mp, sep, sequence_parallel: parallel degrees and the slicing of positions.
        activation_bytes, parameter_bytes, gradient_bytes: bytes of one number of each kind.
        kernels: the implementation to count, see :data:`Kernels`.
        ep, emp: number of ranks that divide the experts of a layer, and that slice each expert; None: ``mp``.
        imbalance: most rows that the experts of one rank get, divided by the mean over ranks.
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
        """Number of the micro batch's tokens on this rank, before sequence parallelism divides them."""
        return self.micro_batch * self.seq_len / self.sep

    @property
    def split(self) -> int:
        """Number of parts into which sequence parallelism divides the positions."""
        return self.mp if self.sequence_parallel else 1

    @property
    def on_cpu(self) -> bool:
        return self.kernels == "cpu"

    @property
    def fused(self) -> bool:
        return self.kernels == "fused"

    @property
    def low_share(self) -> float:
        """Bytes of a new gradient per byte of accumulated gradient; 0 if both have the same type."""
        same = self.gradient_bytes == self.parameter_bytes
        return 0.0 if same else self.parameter_bytes / self.gradient_bytes

    def bytes_of(self, width: float) -> float:
        """Return the bytes of activations ``[tokens, width]`` on one rank."""
        return self.tokens * width * self.activation_bytes

    def part_of(self, width: float) -> float:
        """Like :meth:`bytes_of`, but only at this rank's positions under sequence parallelism."""
        return self.bytes_of(width) / self.split


@dataclass(frozen=True)
class Operation:
    """One operation of a forward pass, with its cost in the forward and the backward pass.

    Attributes:
        kind: ``matmul`` with weights, ``scores`` (batched product of activations), ``flash`` or
            ``elementwise``.
        part: part of the block that recomputation repeats as a unit; ``core`` is inside ``attention``.
        flops: floating-point operations of the forward pass. The backward pass takes twice as many, or 2.5
            times with flash attention, which recomputes the scores.
        num_bytes: bytes read and written in the forward pass, without the operands of a product.
        backward_bytes: the same for the backward pass.
        kernels: kernel launches in the forward pass.
        narrowest: smallest dimension of a product with weights, else 0.
        operands: elements of input and output of a product with weights, which the weight's gradient reads.
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
        """Return whether recompute granularity ``recompute`` runs this operation a second time."""
        return self.part in _REPEATED[recompute]


def matmul(name: str, part: Part, rows: float, width_in: float, width_out: float) -> Operation:
    """Return the operation of multiplying ``[rows, width_in]`` by a weight ``[width_in, width_out]``."""
    return Operation(
        name,
        "matmul",
        part,
        flops=2 * rows * width_in * width_out,
        narrowest=min(rows, width_in, width_out),
        operands=rows * (width_in + width_out),
    )


def elementwise(name: str, part: Part, forward: float, backward: float, kernels: int = 1) -> Operation:
    """Return an elementwise operation. ``forward`` and ``backward`` are the bytes that the passes move."""
    return Operation(name, "elementwise", part, 0.0, forward, backward, kernels)


def residual(name: str, part: Part, work: Work, width: int, dropout: float) -> Operation:
    """Return the operation of dropout and residual addition, including a byte of mask per element."""
    values = work.tokens * width / work.split
    e, mask = work.activation_bytes, int(dropout > 0)
    return elementwise(name, part, values * (3 * e + mask), values * (2 * e + mask), 1 + mask)


def dropout_step(work: Work, writes: str, reads: str, size: float, probability: float) -> Step:
    """Return the tape step (:mod:`ppfleetx.nn.tape`) of dropout, which keeps a mask of one byte per element
    of the ``size`` bytes."""
    if probability == 0:
        return Step(writes, size, (reads,), view=True)
    return Step(writes, size, (reads,), extra=size / work.activation_bytes)
