"""Token and position embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import paddle
import paddle.nn.functional as F
from paddle import nn

from ppfleetx.nn.init import Init
from ppfleetx.nn.positions import Positions
from ppfleetx.nn.stage import LayerFactory


class VocabParallelEmbedding(nn.Layer):
    """The rows of a word table that a tensor-parallel rank holds, ``weight``.

    Paddle's own layer needs ``c_embedding``. On a plugin's device that copies the whole table in each pass.

    Args:
        shape: of this rank's rows.
        rank: its number in the tensor-parallel group.
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
    """A row of this rank's table for each token, and whether it is the token's own, ``[..., 1]``.

    Tokens of other ranks get rows all over the table: a GPU adds up gradients that fall on one row slowly,
    even if they are zero.
    """
    first = rank * num_rows
    is_here = paddle.logical_and(tokens >= first, tokens < first + num_rows)
    return tokens % num_rows, is_here.unsqueeze(-1)


class TokenEmbedding(nn.Layer):
    """Tokens (and learned positions) to the hidden states' ``[s, b, h]``.

    Args:
        factory: makes the tables.
        padded_vocab_size: rows of the word table.
        hidden_size: h.
        positions: what is added for the positions.
        dropout: probability of dropping an element of the sum.
        word_init, position_init: initial values.
        word_embeddings: a word table shared with another stage, to use instead of making one.
    """

    def __init__(
        self,
        factory: LayerFactory,
        *,
        padded_vocab_size: int,
        hidden_size: int,
        positions: Positions,
        dropout: float,
        word_init: Init,
        position_init: Init,
        word_embeddings: nn.Layer | None = None,
    ) -> None:
        super().__init__()
        self.factory = factory
        self.word_embeddings = word_embeddings or factory.vocab_embedding(
            padded_vocab_size, hidden_size, init=word_init
        )
        rows = positions.table_rows
        self.position_embeddings = factory.embedding(rows, hidden_size, init=position_init) if rows else None
        self.added_positions = positions.added
        self.dropout = factory.dropout(dropout)

    def forward(self, tokens: paddle.Tensor, position_ids: paddle.Tensor) -> paddle.Tensor:
        """``tokens [b, s]`` and ``position_ids [b, s]`` to ``[s, b, h]`` (of this rank's positions)."""
        tokens = self.factory.local_positions(tokens)
        # Transposing the ids costs nothing; transposing the embeddings would.
        hidden = self.word_embeddings(tokens.transpose([1, 0]))
        if self.position_embeddings is not None:
            position_ids = self.factory.local_positions(position_ids)
            hidden = hidden + self.position_embeddings(position_ids.transpose([1, 0]))
        elif self.added_positions is not None:
            position_ids = self.factory.local_positions(position_ids)
            hidden = hidden + self.added_positions(position_ids.transpose([1, 0])).astype(hidden.dtype)
        return self.dropout(self.factory.enter_trunk(hidden))
