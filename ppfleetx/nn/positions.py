"""How positions enter a model: something is added to the embeddings, or attention turns by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import paddle


class Rotary(Protocol):
    """Turns queries and keys by their positions; the scores then depend on distances."""

    def rotate(self, x: paddle.Tensor, position_ids: paddle.Tensor) -> paddle.Tensor:
        """``x [b, groups, heads, s, head_dim]`` turned by the positions ``[b, s]``, in the same shape."""


@dataclass(frozen=True)
class Positions:
    """What a position embedding puts into a model. All None: nothing.

    Attributes:
        table_rows: rows of a learned table that is added to the embeddings.
        added: ``position_ids [s, b]`` to what is added to the embeddings, ``[s, b, h]``.
        rotary: turns queries and keys in every block.
    """

    table_rows: int | None = None
    added: Callable[[paddle.Tensor], paddle.Tensor] | None = None
    rotary: Rotary | None = None
