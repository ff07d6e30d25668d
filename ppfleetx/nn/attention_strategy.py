"""Strategies for attention over whole sequences when each rank holds only some of the positions.

Outside attention, each position is computed separately, so each rank along sep takes some of the positions of
every sequence. Attention needs all of them. A strategy determines which positions a rank has outside and
inside attention, and which tensors the ranks exchange before and after it.

Shape letters: s positions, b batch, g key/value heads held here, r query heads per key/value head, d head
size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from ppfleetx.distributed.collectives import exchange

Attend = Callable[[paddle.Tensor, paddle.Tensor, paddle.Tensor, paddle.Tensor | None], paddle.Tensor]
"""Causal attention: ``(query [b, g, r, q, d], key [b, g, k, d], value [b, g, k, d], document_start [b, q])``
to ``[b, g, r, q, d]``. The last query and the last key have the same position. ``document_start`` is the
first key that each query may attend to; None: no limit."""


class AttentionStrategy:
    """Each rank has whole sequences, so nothing is exchanged. Other strategies override what they change.

    Attributes:
        group: the ranks that hold different positions of the same sequences; None: there are no others.
        has_own_core: whether :meth:`core` is overridden. If so, kernels that take queries, keys and values in
            one tensor are not used.
    """

    group: Any = None
    has_own_core = False

    def positions(self, ids: paddle.Tensor) -> paddle.Tensor:
        """The positions of ``[b, s]`` that this rank has outside attention."""
        return ids

    def positions_inside(self, ids: paddle.Tensor) -> paddle.Tensor:
        """The positions of ``[b, s]`` that queries have inside attention."""
        return ids

    def enter(self, qkv: paddle.Tensor) -> paddle.Tensor:
        """Exchange the projection's output ``[s, b, g, r + 2, d]`` for the positions and heads attention
        works on. The last two dimensions may differ."""
        return qkv

    def core(
        self,
        attend: Attend,
        query: paddle.Tensor,
        key: paddle.Tensor,
        value: paddle.Tensor,
        document_start: paddle.Tensor | None,
    ) -> paddle.Tensor:
        """Run attention with the kernel ``attend`` on queries and keys with rotary positions already
        applied."""
        return attend(query, key, value, document_start)

    def leave(self, context: paddle.Tensor) -> paddle.Tensor:
        """Exchange attention's output ``[s, b, g * r * d]`` for this rank's own positions and all of its
        heads."""
        return context


class Ulysses(AttentionStrategy):
    """Each rank holds consecutive positions. Around attention, ranks exchange their positions of all heads
    for all positions of their heads (Jacobs et al., "DeepSpeed Ulysses", 2023)."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def positions(self, ids: paddle.Tensor) -> paddle.Tensor:
        return ids.split(self.group.nranks, axis=1)[self.group.rank]

    def enter(self, qkv: paddle.Tensor) -> paddle.Tensor:
        return exchange(qkv, self.group, split_dim=2, concat_dim=0)

    def leave(self, context: paddle.Tensor) -> paddle.Tensor:
        return exchange(context, self.group, split_dim=0, concat_dim=2)
