"""Context parallelism: attention over sequences whose positions are divided over the ranks.

Shape letters: s positions, b batch, g key/value heads on this rank, r query heads per key/value head, d head
size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from ppfleetx.distributed.collectives import exchange

Attend = Callable[[paddle.Tensor, paddle.Tensor, paddle.Tensor, paddle.Tensor | None], paddle.Tensor]
"""Causal attention: maps ``(query [b, g, r, q, d], key [b, g, k, d], value [b, g, k, d], document_start [b,
q])`` to ``[b, g, r, q, d]``.

The last query and the last key have the same position. ``document_start`` is the first key that each query
may attend to; None: no limit.
"""


class AttentionStrategy:
    """Base class of context-parallel strategies. The base class itself is the strategy without context
    parallelism.

    Attributes:
        group: process group of the ranks that divide the positions of a sequence; None: sequences are not
            divided.
        has_own_core: whether the class overrides :meth:`core`. A subclass that does so must set this to True.
    """

    group: Any = None
    has_own_core = False  # if True, kernels for packed queries, keys and values are not used

    def positions(self, ids: paddle.Tensor) -> paddle.Tensor:
        """Return the columns of ``ids [b, s]`` that this rank processes outside attention. ``ids`` covers
        whole sequences."""
        return ids

    def positions_inside(self, ids: paddle.Tensor) -> paddle.Tensor:
        """Return the columns of ``ids [b, s]`` for which this rank computes attention. ``ids`` covers whole
        sequences."""
        return ids

    def enter(self, qkv: paddle.Tensor) -> paddle.Tensor:
        """Exchange queries, keys and values among the context-parallel ranks before attention. The result has
        the positions and heads for which this rank computes attention.

        Args:
            qkv: ``[s, b, key/value heads, query heads per key/value head + 2, head size]``.
        """
        # The last two dimensions have other sizes in latent attention.
        return qkv

    def core(
        self,
        attend: Attend,
        query: paddle.Tensor,
        key: paddle.Tensor,
        value: paddle.Tensor,
        document_start: paddle.Tensor | None,
    ) -> paddle.Tensor:
        """Return the output of attention, computed by the function ``attend``. Queries and keys are already
        rotated. A subclass can also communicate among ranks here."""
        return attend(query, key, value, document_start)

    def leave(self, context: paddle.Tensor) -> paddle.Tensor:
        """Exchange the output of attention, ``[s, b, heads * head size]``, among the context-parallel ranks.
        The result has only this rank's positions, with all heads."""
        return context


class Ulysses(AttentionStrategy):
    """Context parallelism by all-to-all exchanges before and after attention (Jacobs et al., "DeepSpeed
    Ulysses", 2023). Outside attention, each rank has consecutive positions. Inside attention, it has all
    positions of some heads."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def positions(self, ids: paddle.Tensor) -> paddle.Tensor:
        return ids.split(self.group.nranks, axis=1)[self.group.rank]

    def enter(self, qkv: paddle.Tensor) -> paddle.Tensor:
        return exchange(qkv, self.group, split_dim=2, concat_dim=0)

    def leave(self, context: paddle.Tensor) -> paddle.Tensor:
        return exchange(context, self.group, split_dim=0, concat_dim=2)
