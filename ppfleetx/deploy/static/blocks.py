"""All blocks of a quantised model in one operation of an exported program.

It is the operator that :mod:`ppfleetx.generation.fused` uses. A program with it runs only where that is
compiled, and takes it for all passes but the first, which reads the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import nn

from ppfleetx.deploy.static.cache import LoopCache, RoomCache
from ppfleetx.deploy.static.linear import SmallMatrix
from ppfleetx.generation.fused import FusedBlocks, can_fuse, linears_of
from ppfleetx.nn.cpu_ops import fused_blocks


class ProgramBlocks:
    """The blocks and the final norm, whose weights are made once, when the program is loaded."""

    def __init__(self, layers: Sequence[nn.Layer]) -> None:
        self.fused = FusedBlocks(layers)
        self.weights: fused_blocks.BlockWeights | None = None


def program_blocks(layers: Sequence[nn.Layer]) -> ProgramBlocks | None:
    """Of the blocks and the final norm of a program; None: they are run layer by layer."""
    if not fused_blocks.all_are_available() or not can_fuse(layers):
        return None
    linears = [linear for block in layers[:-1] for linear in linears_of(block)]
    matrices = [getattr(linear, "matrix", None) for linear in linears]
    return ProgramBlocks(layers) if all(isinstance(one, SmallMatrix) for one in matrices) else None


@paddle.jit.not_to_static
def make_weights(blocks: ProgramBlocks | None) -> None:
    """To be called in the program after the matrices' ``begin``, and outside of branches."""
    if blocks is not None:
        blocks.weights = blocks.fused.make_weights(_add_linear)


def run_blocks(
    blocks: ProgramBlocks, hidden: paddle.Tensor, position_ids: paddle.Tensor, cache: LoopCache | RoomCache
) -> paddle.Tensor:
    """``hidden [s, b, h]`` through all blocks; the positions ``[b, s]`` follow others in ``cache``."""
    fused = blocks.fused
    column, penalty, memory = cache.place(fused.window, hidden.shape[0])
    out, cache.extended = fused.run_with(blocks.weights, hidden, position_ids, column, penalty, memory)
    return out


def _add_linear(weights: fused_blocks.BlockWeights, linear: nn.Layer) -> bool:
    matrix: SmallMatrix = linear.matrix
    values, scales = matrix.as_stored
    weights.add_linear(matrix.stored.panel_format, values, scales, linear.weight.shape[1], linear.bias)
    return True
