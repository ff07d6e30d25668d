"""Position embeddings: added to the hidden states, or applied to queries and keys in attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import paddle


class Rotary(Protocol):
    """Turns queries and keys by their positions; the scores then depend on distances."""

    def rotate(self, x: paddle.Tensor, position_ids: paddle.Tensor) -> paddle.Tensor:
        """Rotate ``x [b, groups, heads, s, head_dim]`` by the positions ``[b, s]``; the shape stays."""


@dataclass(frozen=True)
class Positions:
    """The parts of a position embedding. All None: the model has no position embedding.

    Attributes:
        table_rows: rows of a learned table that is added to the embeddings.
        offset: the row of position 0.
        added: ``position_ids [s, b]`` to what is added to the embeddings, ``[s, b, h]``.
        rotary: turns queries and keys in every block.
        local_rotary: does so in the layers with a window; None: as in the others.
        biases: scores get linear biases, which the blocks make.
    """

    table_rows: int | None = None
    offset: int = 0
    added: Callable[[paddle.Tensor], paddle.Tensor] | None = None
    rotary: Rotary | None = None
    local_rotary: Rotary | None = None
    biases: bool = False

    @property
    def reach_blocks(self) -> bool:
        """Whether blocks read the positions."""
        return self.rotary is not None or self.biases
