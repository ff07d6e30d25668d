"""The word table under tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import paddle
import paddle.nn.functional as F
from paddle import nn


class VocabParallelEmbedding(nn.Layer):
    """A word embedding whose rows are divided over the tensor-parallel ranks.

    Paddle's own layer uses ``c_embedding``, which copies the whole table in each pass on a plugin's device.

    Args:
        shape: shape of this rank's rows.
        rank: this rank's number in the tensor-parallel group.
        join: sums the ranks' results.
    """

    def __init__(
        self, shape: Sequence[int], *, rank: int, join: Callable[[paddle.Tensor], paddle.Tensor]
    ) -> None:
        super().__init__()
        self.rank, self.join = rank, join
        self.weight = self.create_parameter(list(shape), default_initializer=nn.initializer.Constant(0.0))

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """Token ids ``[...]`` to ``[..., h]``."""
        rows, is_here = local_rows(tokens, self.weight.shape[0], self.rank)
        return self.join(F.embedding(rows, self.weight) * is_here.astype(self.weight.dtype))


def local_rows(tokens: paddle.Tensor, num_rows: int, rank: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    """For each token, a row of this rank's table and whether the token belongs to this rank, ``[..., 1]``.

    Tokens of other ranks get rows spread over the table, because a GPU is slow to add many gradients to one
    row, even if they are zero.
    """
    first = rank * num_rows
    is_here = paddle.logical_and(tokens >= first, tokens < first + num_rows)
    return tokens % num_rows, is_here.unsqueeze(-1)
