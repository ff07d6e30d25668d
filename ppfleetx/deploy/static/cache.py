"""Key/value caches for the decoding loop inside an exported program.

A row is one sequence of the batch, and a column is one position.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import _C_ops

from ppfleetx.nn.masks import penalty_of


class LoopCache:
    """A key/value cache for one iteration of the exported decoding loop. ``past`` has the keys and values
    of earlier positions: layer 0's keys, layer 0's values, layer 1's keys, and so on. ``extended`` has
    copies in the same order, with the new positions appended."""

    def __init__(self, past: Sequence[paddle.Tensor]) -> None:
        self.past, self.extended = past, []

    def update(
        self, layer_index: int, key: paddle.Tensor, value: paddle.Tensor, window: int | None = None
    ) -> tuple[paddle.Tensor, paddle.Tensor, None]:
        """Append the ``key`` and ``value`` of new positions, [sequences, key/value heads, positions, head
        size], to the cache of layer ``layer_index``. Returns the layer's keys and values of all positions,
        and None in place of an attention mask. Call it once for each layer, in model order."""
        if self.past:
            key = paddle.concat([self.past[2 * layer_index], key], axis=2)
            value = paddle.concat([self.past[2 * layer_index + 1], value], axis=2)
        self.extended += [key, value]
        return key, value, None

    def prepare(
        self, window: int | None, num_new: paddle.Tensor | int
    ) -> tuple[paddle.Tensor, paddle.Tensor | None, list[paddle.Tensor]]:
        """Prepare the cache for an operation that runs all layers at once on a single sequence without
        padding.

        Returns:
            The index of the first new position, ``[1]``; the additive attention mask, or None if ``window``
            is None; and the keys and values of all layers, extended by zeros for ``num_new`` positions.
        """
        num_past = self.past[0].shape[2]
        memory = with_room(self.past, num_new)
        penalty = None
        if window is not None:
            columns = paddle.arange(num_past + num_new)
            rows = columns[num_past:].unsqueeze(1)
            visible = paddle.logical_and(columns <= rows, columns >= rows - window)
            penalty = penalty_of(visible.unsqueeze([0, 1]))
        return paddle.full([1], num_past, "int64"), penalty, memory


class PreallocatedCache:
    """A key/value cache for one iteration of the exported decoding loop, in memory that was allocated before
    the loop.

    Args:
        past: keys and values of each layer, [sequences, key/value heads, allocated positions, head size].
            They must be zero from index ``column`` on.
        column: index of the new position among the allocated ones.
        visible: which positions each sequence may attend to, bool [sequences, allocated positions].
    """

    def __init__(self, past: Sequence[paddle.Tensor], column: paddle.Tensor, visible: paddle.Tensor) -> None:
        self.past, self.column, self.extended = past, column, []
        self.visible = visible
        self.penalties: dict[int | None, paddle.Tensor] = {}

    def update(
        self, layer_index: int, key: paddle.Tensor, value: paddle.Tensor, window: int | None = None
    ) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        """Write ``key`` and ``value`` of one new position, [sequences, key/value heads, 1, head size], into
        the cache of layer ``layer_index``. Returns the keys, the values and the additive attention mask of
        the layer. Call it once for each layer, in model order."""
        # paddle.index_add_ copies in a static program, and Paddle's inplace pass skips loop variables.
        key = _C_ops.index_add_(self.past[2 * layer_index], self.column, key, 2)
        value = _C_ops.index_add_(self.past[2 * layer_index + 1], self.column, value, 2)
        self.extended += [key, value]
        return key, value, self._penalty(window)

    def prepare(
        self, window: int | None, num_new: paddle.Tensor | int
    ) -> tuple[paddle.Tensor, paddle.Tensor | None, list[paddle.Tensor]]:
        """Prepare the cache for an operation that runs all layers at once.

        Returns:
            The index of the new position among the allocated ones; the additive attention mask; and the keys
            and values of all layers.
        """
        return self.column, self._penalty(window), list(self.past)

    def _penalty(self, window: int | None) -> paddle.Tensor:
        """Return the additive attention mask for layers with the given attention window. A token attends to
        itself and to the ``window`` positions before it, or to all of them if ``window`` is None."""
        if window not in self.penalties:
            visible = self.visible
            if window is not None:
                # Padding is only on the left, so the columns before a token are its earlier positions.
                columns = paddle.arange(visible.shape[1])
                visible = paddle.logical_and(visible, columns >= self.column - window)
            self.penalties[window] = penalty_of(visible.unsqueeze([1, 2]))
        return self.penalties[window]


def with_room(past: Sequence[paddle.Tensor], num_columns: paddle.Tensor | int) -> list[paddle.Tensor]:
    """Return ``past``, the keys and values of all layers, with ``num_columns`` positions of zeros appended to
    each tensor."""
    rows, groups = past[0].shape[:2]
    # Keys and values may differ in head size, but are the same in all layers.
    rooms = [paddle.zeros([rows, groups, num_columns, one.shape[3]], one.dtype) for one in past[:2]]
    return [paddle.concat([tensor, rooms[i % 2]], axis=2) for i, tensor in enumerate(past)]
