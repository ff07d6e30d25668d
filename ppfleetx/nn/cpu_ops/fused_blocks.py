"""One CPU operator that runs all transformer blocks and the final norm on a few new positions (decoding).

Shape letters: s new positions, b rows, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial

import paddle
import paddle.nn.functional as F
from paddle import _C_ops

from ppfleetx.nn.cpu_ops import ops, quantized
from ppfleetx.nn.mlp import gelu_tanh, quick_gelu, relu, relu_squared, swiglu

FORMATS = ("whole", "panels", "int8", "int4", "int8_int8", "int4_int8")
"""The formats of a matrix. ``whole``: ``[in, out]`` float32. ``panels``: the panels of
:mod:`ppfleetx.nn.panel_matmul`. All other formats: the panels of :mod:`ppfleetx.nn.cpu_ops.quantized`. The
operator identifies a format by its index."""
ACTIVATIONS: tuple[Callable[[paddle.Tensor], paddle.Tensor], ...] = (
    gelu_tanh,
    F.gelu,
    quick_gelu,
    relu,
    relu_squared,
    swiglu,
)
"""The MLP activations that the operator supports."""
are_available = partial(ops.load, "fused_blocks")


def all_are_available() -> bool:
    """Return whether the CPU operators for exported programs with fused blocks are all compiled."""
    return are_available() and ops.are_available() and quantized.are_available()


@dataclass(frozen=True)
class BlockSizes:
    """The sizes that are the same in all blocks of the model, in the order in which the operator reads them.

    Attributes:
        groups: number of key/value heads.
        per_group: number of query heads per key/value head.
        rotary_dim: number of features of a head with rotary positions; 0: none.
        activation: index in :data:`ACTIVATIONS`.
        inner: number of input features of the MLP's second matrix.
        parallel_residual: whether the MLP reads the same hidden states as attention.
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
    """The weights of all blocks (``tensors``), and integers that tell the operator where to use each weight
    (``layout``)."""

    tensors: list[paddle.Tensor] = field(default_factory=list)
    # First come the sizes. Then, for each linear and norm of each block and for the final norm, come the
    # indices of its weights in ``tensors``.
    layout: list[int] = field(default_factory=list)

    def begin(self, sizes: BlockSizes, num_blocks: int) -> None:
        """Append the sizes and the number of blocks to ``layout``. This must be called first."""
        self.layout += [*map(int, astuple(sizes)), num_blocks]

    def add_linear(
        self,
        kind: str,
        values: paddle.Tensor,
        scales: paddle.Tensor | None,
        columns: int,
        bias: paddle.Tensor | None,
    ) -> None:
        """Append a linear's tensors to ``tensors``, and its description to ``layout``. Each block has four
        linears, which must be added in this order: ``qkv``, ``out_proj``, ``fc1``, ``fc2``.

        Args:
            kind: format of the weight, one of :data:`FORMATS`.
            values: the weight in this format.
            scales: scales of a quantized weight, else None.
            columns: number of output features.
        """
        self.layout.append(FORMATS.index(kind))
        self._point_to(values)
        self._point_to(scales)
        self.layout.append(columns)
        self._point_to(bias)

    def add_norm(self, weight: paddle.Tensor | None, bias: paddle.Tensor | None = None) -> None:
        """Append a norm: LayerNorm if ``bias`` is given, else RMSNorm. If ``weight`` is None, the block has
        no norm at this point. Each block has six norms, which must be added after its linears in this order:
        before attention, after attention, before the MLP, after the MLP, of queries, of keys. The final norm
        comes last."""
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
    """Run all blocks and the final norm on the new positions, without gradients.

    Args:
        hidden: ``[s, b, h]`` float32 on CPU.
        column: ``[1]`` int64, index of the cache column in which the first new position is stored.
        penalty: ``[b or 1, 1, s, columns of the cache]`` float32, added to the scores in addition to the
            causal mask; None: nothing is added.
        angles: cos and sin ``[b, s, rotary_dim / 2]`` of the positions; None: no rotary positions.
        cache: keys of the first block, values of the first block, keys of the second block, and so on, each
            ``[b, key/value heads, columns, head size]``. New columns are written in place.

    Returns:
        Hidden states ``[s, b, h]``, and the tensors of the cache.
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
