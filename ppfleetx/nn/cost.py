"""Cost model of layers: the sizes on which the cost depends (:class:`Work`), and the operations of a forward
pass (:class:`Operation`). Does not import Paddle.

A multiply-add counts as two floating-point operations. Attention is counted over all pairs of positions,
or, with flash attention, over the causal half.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ppfleetx.nn.activation_memory import Step

Kernels = Literal["cpu", "gpu", "plugin", "fused"]
"""The implementation whose operations are counted:

``cpu``: this toolkit on a CPU, in float32, or with bfloat16 matmuls (``Work.rounds_matmuls``).
``gpu``: this toolkit on a GPU, with reference or flash attention (``Work.flash``).
``plugin``: this toolkit on a plugin's device (Ascend): as on a GPU, but with an unfused tensor-parallel loss.
``fused``: Megatron-LM and PaddleFleetX, to compare with published runs. Scale, mask and softmax are one
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
    """The sizes on which the cost of a layer depends: those of one micro batch on one rank, the parallel
    degrees, and the bytes per element.

    Attributes:
        micro_batch: number of sequences.
        seq_len: tokens per sequence, over all context-parallel ranks.
        activation_bytes, parameter_bytes, gradient_bytes: bytes per element.
        kernels: which kernels run the layers: ``cpu``, ``gpu``, ``plugin`` or ``fused``.
        ep: number of ranks that divide the experts of a layer.
        emp: number of ranks that slice each expert; None: ``mp``.
        imbalance: number of rows that the busiest rank's experts process, divided by the mean over the ranks.
        rounds_matmuls: whether matmuls with weights round their operands to 16 bits, as on a CPU.
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
    rounds_matmuls: bool = False

    @cached_property
    def tokens(self) -> float:
        """Number of tokens of the micro batch on this rank, before sequence parallelism divides them."""
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
    def new_gradient_share(self) -> float:
        """Size of a new parameter gradient, divided by the size of the accumulated gradient to which it is
        added, for example 2 bytes / 4 bytes = 0.5. If both have the same type, the memory simulation counts
        no memory for the new gradient, and the result is 0."""
        same = self.gradient_bytes == self.parameter_bytes
        return 0.0 if same else self.parameter_bytes / self.gradient_bytes

    def bytes_of(self, width: float) -> float:
        """Return the bytes of activations ``[tokens, width]`` that sequence parallelism does not divide."""
        return self.tokens * width * self.activation_bytes

    def split_bytes_of(self, width: float) -> float:
        """Return the bytes of one rank's part of activations ``[tokens, width]`` that sequence parallelism
        divides. Without sequence parallelism, the part is the whole."""
        return self.bytes_of(width) / self.split


@dataclass(frozen=True)
class Operation:
    """One operation of a forward pass, with its cost in the forward and the backward pass.

    Attributes:
        kind: ``matmul`` (with a weight), ``scores`` (a matmul of activations), ``flash`` or ``elementwise``.
        part: ``attention``, ``core`` (of attention) or ``mlp`` of a transformer block, or ``edge`` (outside
            the blocks). Recomputation repeats whole parts.
        flops: floating-point operations of the forward pass.
        num_bytes, backward_bytes: bytes read and written in each pass, without the operands of a matmul.
        kernels: kernel launches in the forward pass.
        narrowest: smallest dimension of a matmul with a weight, else 0.
        operands: number of elements of the input and output of a matmul with a weight, else 0.
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
        return self.flops * (2.5 if self.kind == "flash" else 2.0)  # flash attention recomputes the scores

    def is_repeated(self, recompute: Recompute) -> bool:
        """Return whether the backward pass runs this operation again under recompute granularity
        ``recompute``."""
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
    """Return an elementwise operation. ``forward`` and ``backward`` are the bytes read and written in each
    pass."""
    return Operation(name, "elementwise", part, 0.0, forward, backward, kernels)


def residual(name: str, part: Part, work: Work, width: int, dropout: float) -> Operation:
    """Return dropout and the residual addition as one operation. If ``dropout`` is above 0, the operation
    also writes and reads a mask of one byte per element."""
    values = work.tokens * width / work.split
    e, mask = work.activation_bytes, int(dropout > 0)
    return elementwise(name, part, values * (3 * e + mask), values * (2 * e + mask), 1 + mask)


def dropout_step(work: Work, writes: str, reads: str, size: float, probability: float) -> Step:
    """Return dropout of a tensor of ``size`` bytes as a step of the memory simulation
    (:mod:`ppfleetx.nn.activation_memory`). The step keeps a mask of one byte per element. With probability 0,
    the result is a view, and there is no mask."""
    if probability == 0:
        return Step(writes, size, (reads,), view=True)
    return Step(writes, size, (reads,), extra=size / work.activation_bytes)
