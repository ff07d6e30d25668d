"""Key/value caches in the decoding loop of an exported program.

A column is one position. Shape letters: b rows, g key/value heads, k columns allocated, s new positions, d
head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import _C_ops

from ppfleetx.generation.cache import ROOM
from ppfleetx.nn.masks import penalty_of


class LoopCache:
    """The cache of one loop iteration, which concatenates new keys and values to the ``past`` ones."""

    def __init__(self, past: Sequence[paddle.Tensor]) -> None:
        self.past, self.extended = past, []

    def update(
        self, layer_index: int, key: paddle.Tensor, value: paddle.Tensor, window: int | None = None
    ) -> tuple[paddle.Tensor, paddle.Tensor, None]:
        """Append ``key`` and ``value``, ``[b, g, s, d]``. Must be called in layer order."""
        if self.past:
            key = paddle.concat([self.past[2 * layer_index], key], axis=2)
            value = paddle.concat([self.past[2 * layer_index + 1], value], axis=2)
        self.extended += [key, value]
        return key, value, None

    def place(
        self, window: int | None, num_new: paddle.Tensor | int
    ) -> tuple[paddle.Tensor, paddle.Tensor | None, list[paddle.Tensor]]:
        """Prepare a pass that runs all layers in one operation, for a single row without padding.

        Returns the first new column ``[1]``, the additive attention mask (None: no mask), and keys and values
        with room for ``num_new`` more columns.
        """
        num_past = self.past[0].shape[2]
        memory = _with_room(self.past, num_new)
        penalty = None
        if window is not None:
            columns = paddle.arange(num_past + num_new)
            rows = columns[num_past:].unsqueeze(1)
            visible = paddle.logical_and(columns <= rows, columns >= rows - window)
            penalty = penalty_of(visible.unsqueeze([0, 1]))
        return paddle.full([1], num_past, "int64"), penalty, memory


class RoomCache:
    """The cache of one loop iteration, which writes into preallocated memory.

    Keys and values ``past [b, g, k, d]`` are zero from ``column [1]`` on, and the new ones are written there
    in place. Copying them in every iteration would take a tenth of the time of a batch of 8. ``visible [b,
    k]`` are the columns that each row may attend to.
    """

    def __init__(self, past: Sequence[paddle.Tensor], column: paddle.Tensor, visible: paddle.Tensor) -> None:
        self.past, self.column, self.extended = past, column, []
        self.visible = visible
        self.penalties: dict[int | None, paddle.Tensor] = {}

    def update(
        self, layer_index: int, key: paddle.Tensor, value: paddle.Tensor, window: int | None = None
    ) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        """Write ``key`` and ``value``, ``[b, g, 1, d]``. Must be called in layer order."""
        # paddle.index_add_ copies in a static program, and Paddle's inplace pass skips loop variables.
        key = _C_ops.index_add_(self.past[2 * layer_index], self.column, key, 2)
        value = _C_ops.index_add_(self.past[2 * layer_index + 1], self.column, value, 2)
        self.extended += [key, value]
        return key, value, self._penalty(window)

    def place(
        self, window: int | None, num_new: paddle.Tensor | int
    ) -> tuple[paddle.Tensor, paddle.Tensor | None, list[paddle.Tensor]]:
        """Prepare a pass that runs all layers in one operation. Returns the column, the additive attention
        mask, and the memory."""
        return self.column, self._penalty(window), list(self.past)

    def _penalty(self, window: int | None) -> paddle.Tensor:
        """The additive attention mask for layers with this sliding window. Rows have no unused columns inside
        the window."""
        if window not in self.penalties:
            visible = self.visible
            if window is not None:
                columns = paddle.arange(visible.shape[1])
                visible = paddle.logical_and(visible, columns >= self.column - window)
            self.penalties[window] = penalty_of(visible.unsqueeze([1, 2]))
        return self.penalties[window]


def with_room(past: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
    """Append columns of zeros to keys and values ``past``."""
    return _with_room(past, ROOM)


def _with_room(past: Sequence[paddle.Tensor], num_columns: paddle.Tensor | int) -> list[paddle.Tensor]:
    rows, groups = past[0].shape[:2]
    # Keys and values may differ in head size, but are the same in all layers.
    rooms = [paddle.zeros([rows, groups, num_columns, one.shape[3]], one.dtype) for one in past[:2]]
    return [paddle.concat([tensor, rooms[i % 2]], axis=2) for i, tensor in enumerate(past)]
