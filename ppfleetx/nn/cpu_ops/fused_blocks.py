"""One CPU operator that runs all transformer blocks over a few new positions.

A block takes thirty operations of Paddle. For few rows, starting them takes as long as computing them, or
longer if weights have few bits. ``fused_blocks.cc`` does all blocks and the final norm in one operation:
norms, rotary positions, the cache, attention, activations, and products with matrices as they are stored. It
computes the same as the layers, in float32, up to rounding.

Shape letters: s new positions, b rows, h hidden, g key/value heads, k columns of the cache, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import paddle
import paddle.nn.functional as F
from paddle import _C_ops

from ppfleetx.nn.cpu_ops import ops, quantized
from ppfleetx.nn.mlp import gelu_tanh, quick_gelu, relu, relu_squared, swiglu

FORMATS = ("whole", "panels", "int8", "int4", "int8_int8", "int4_int8")
"""The formats of a matrix: ``[in, out]`` float32, the panels of :mod:`ppfleetx.nn.packed_weights`, or the
panels of :mod:`ppfleetx.nn.cpu_ops.quantized`, in the order of its products."""
ACTIVATIONS: tuple[Callable[[paddle.Tensor], paddle.Tensor], ...] = (
    gelu_tanh,
    F.gelu,
    quick_gelu,
    relu,
    relu_squared,
    swiglu,
)
"""The activations that the operator supports in a feed-forward part."""
are_available = partial(ops.load, "fused_blocks")


def all_are_available() -> bool:
    """Whether this and all other CPU operators can be called. A program with fused blocks needs all of
    them."""
    return are_available() and ops.are_available() and quantized.are_available()


@dataclass(frozen=True)
class BlockSizes:
    """The sizes that all blocks of the model share.

    Attributes:
        groups: key/value heads.
        per_group: query heads per key/value head.
        head_dim: d.
        rotary_dim: number of features of a head with rotary positions; 0: none.
        activation: index in :data:`ACTIVATIONS`.
        inner: input features of the second matrix of the feed-forward part.
        parallel_residual: whether the feed-forward part has the same input as attention.
    """

    groups: int
    per_group: int
    head_dim: int
    rotary_dim: int
    activation: int
    inner: int
    parallel_residual: bool


@dataclass
class BlockWeights:
    """Weights in the order in which the operator reads them, and their positions.

    Attributes:
        tensors: the weights.
        layout: numbers for the sizes, then for the linears and norms of each block, then for the final norm.
    """

    tensors: list[paddle.Tensor] = field(default_factory=list)
    layout: list[int] = field(default_factory=list)

    def begin(self, sizes: BlockSizes, num_blocks: int) -> None:
        """Start a new block; call this before its linears and norms are added."""
        self.layout += [
            sizes.groups,
            sizes.per_group,
            sizes.head_dim,
            sizes.rotary_dim,
            sizes.activation,
            sizes.inner,
            int(sizes.parallel_residual),
            num_blocks,
        ]

    def add_linear(
        self,
        kind: str,
        values: paddle.Tensor,
        scales: paddle.Tensor | None,
        columns: int,
        bias: paddle.Tensor | None,
    ) -> None:
        """Add a matrix with ``columns`` output features; ``kind`` is one of :data:`FORMATS`. A block has four
        matrices: ``qkv``, ``out_proj``, ``fc1``, ``fc2``."""
        self.layout.append(FORMATS.index(kind))
        self._point_to(values)
        self._point_to(scales)
        self.layout.append(columns)
        self._point_to(bias)

    def add_norm(self, weight: paddle.Tensor | None, bias: paddle.Tensor | None = None) -> None:
        """Add a norm: LayerNorm if it has a bias, RMSNorm if not, and no norm if ``weight`` is None. A block
        has six, after its linears: before and after attention, before and after the feed-forward part, of
        queries, of keys."""
        self._point_to(weight)
        self._point_to(bias)

    def _point_to(self, tensor: paddle.Tensor | None) -> None:
        self.layout.append(-1 if tensor is None else len(self.tensors))
        if tensor is not None:
            self.tensors.append(tensor)


def run(
    hidden: paddle.Tensor,
    column: paddle.Tensor,
    penalty: paddle.Tensor | None,
    angles: tuple[paddle.Tensor, paddle.Tensor] | None,
    cache: Sequence[paddle.Tensor],
    weights: BlockWeights,
    epsilon: float,
) -> tuple[paddle.Tensor, list[paddle.Tensor]]:
    """Run all blocks and the final norm on ``hidden [s, b, h]``, without gradients.

    Args:
        hidden: float32 on CPU.
        column: ``[1]`` int64, the cache's column for the first new position.
        penalty: ``[b, 1, s, k]`` or ``[1, 1, s, k]`` float32, added to the scores; None: nothing is added. A
            position never sees later positions.
        angles: cos and sin ``[b, s, rotary_dim / 2]`` of the positions; None: no rotary positions.
        cache: keys and values of each block in turn, ``[b, g, k, d]``; new columns are written into them.
        weights: see :class:`BlockWeights`.
        epsilon: epsilon of all norms.

    Returns:
        ``[s, b, h]``, and the cache's tensors.
    """
    cos, sin = (None, None) if angles is None else angles
    out, *cached = _C_ops._run_custom_op(
        "ppfleetx_trunk",
        hidden,
        column,
        penalty,
        cos,
        sin,
        list(cache),
        weights.tensors,
        weights.layout,
        epsilon,
    )
    return out, cached
