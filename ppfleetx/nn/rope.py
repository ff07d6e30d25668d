"""Rotary position embedding (Su et al., 2021) in Llama's rotate-half convention.

Dimension ``i`` of the first half of a head is paired with dimension ``i`` of the second half; the pair
is turned by ``position * base ** (-2 i / head_dim)``.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import paddle


@lru_cache(maxsize=4)
def _tables(
    max_positions: int, head_dim: int, base: float, device: str
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """cos and sin ``[max_positions, head_dim / 2]`` in float32, computed in float64."""
    inverse_frequency = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.arange(max_positions, dtype=np.float64)[:, None] * inverse_frequency
    return (
        paddle.to_tensor(np.cos(angles).astype(np.float32)),
        paddle.to_tensor(np.sin(angles).astype(np.float32)),
    )


class RotaryEmbedding:
    """cos and sin tables for the positions of a batch, and the rotation itself.

    Args:
        head_dim: even size of a head.
        max_positions: positions the table covers.
        base: the formula's base, 10000 in the paper.
    """

    def __init__(self, head_dim: int, max_positions: int, base: float) -> None:
        assert head_dim % 2 == 0
        self.head_dim, self.max_positions, self.base = head_dim, max_positions, base

    def rotate(self, x: paddle.Tensor, position_ids: paddle.Tensor) -> paddle.Tensor:
        """Turn each head of ``x [s, b, ..., head_dim]`` (five dimensions) by its position ``[b, s]``."""
        cos, sin = _tables(self.max_positions, self.head_dim, self.base, paddle.get_device())
        index = position_ids.transpose([1, 0])
        cos = paddle.nn.functional.embedding(index, cos).unsqueeze([2, 3])
        sin = paddle.nn.functional.embedding(index, sin).unsqueeze([2, 3])
        first, second = x.astype("float32").chunk(2, axis=-1)
        turned = paddle.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.astype(x.dtype)
