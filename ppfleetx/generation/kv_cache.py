"""The key/value cache of a batch of sequences (rows). A column of the cache is one position.

Shape letters: b rows, g key/value heads, n columns in use, k columns allocated, d head size.
"""

from __future__ import annotations

import numpy as np
import paddle

from ppfleetx.nn.masks import cached_mask, penalty_of

ROOM = 32
"""The number of spare columns that each allocation adds."""

Pair = tuple[paddle.Tensor, paddle.Tensor]
Layers = dict[int, Pair]
"""Keys and values ``[b, g, n, d]`` of each layer."""


class GrowingCache:
    """A key/value cache for batches in which each forward pass adds the same number of positions to every
    row. Implements the protocol :class:`~ppfleetx.nn.attention.KeyValueCache`."""

    def __init__(self) -> None:
        self._layers: Layers = {}  # [b, g, k, d], contiguous; unused columns hold finite numbers
        self._past = self.length = 0  # columns in use (n) before and after this pass
        self._num_new, self._visible = 0, np.zeros((0, 0), dtype=bool)
        self._row_lengths: np.ndarray | None = None
        self._penalties: dict[int | None, paddle.Tensor] = {}  # masks of this pass, by window
        self._places: paddle.Tensor | None = None  # indices of new columns in [b * g * k, d]

    def extend(self, num_new: int, visible: np.ndarray, row_lengths: np.ndarray | None = None) -> None:
        """Begin a forward pass that adds ``num_new`` columns (positions) to the n columns of each row.
        After this call, every layer calls :meth:`update`.

        Args:
            visible: ``[b, n + num_new]`` bool: the columns that the new positions of each row may attend to.
                The causal mask applies in addition. In the first pass, :meth:`update` ignores ``visible``,
                because attention then masks padding itself.
            row_lengths: ``[b]`` number of tokens of each row. None: count the row's visible columns.
        """
        self._past, self.length = self.length, self.length + num_new
        if self._past:
            self._make_room()
        self._num_new, self._visible = num_new, visible[:1] if visible.all() else visible
        self._penalties, self._places = {}, None
        self._row_lengths = row_lengths

    def row_lengths(self) -> paddle.Tensor:
        """Return the number of tokens of each row, ``[b, 1]`` int64."""
        lengths = self._visible.sum(axis=1) if self._row_lengths is None else self._row_lengths
        return paddle.to_tensor(lengths.astype(np.int64)[:, None])

    def begin(self, num_layers: int, rows: int, groups: int, head_dim: int) -> None:
        """Allocate the keys and values of all layers, filled with zeros, for the first pass. Only the C++
        operator that computes all layers at once needs this call."""
        shape = [rows, groups, self.length + ROOM, head_dim]
        self._layers = {layer: (paddle.zeros(shape), paddle.zeros(shape)) for layer in range(num_layers)}

    def update(
        self, layer_index: int, key: paddle.Tensor, value: paddle.Tensor, window: int | None = None
    ) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor | None]:
        """Append the keys and values of new positions to the cache of one layer. ``key`` and ``value`` are
        [rows, key/value heads, new positions, head size]. Returns all keys and values of the layer, old and
        new, and an additive attention mask. The returned keys and values can end with unused positions, which
        the mask hides. In the first pass, there are no unused positions, and the mask is None."""
        if not self._past:
            self._layers[layer_index] = (key.contiguous(), value.contiguous())
            # In the first pass, the attention layers apply their own masks.
            return key, value, None
        keys, values = self._layers[layer_index]
        self._write_new_columns(keys, key)
        self._write_new_columns(values, value)
        return keys, values, self._penalty(window, keys.shape[2])

    @property
    def has_past(self) -> bool:
        """Whether the cache held tokens before the current pass; False in the first pass."""
        return bool(self._past)

    def prepare(
        self, window: int | None, num_new: int
    ) -> tuple[paddle.Tensor, paddle.Tensor | None, list[paddle.Tensor]]:
        """Prepare the cache for an operation that runs all layers at once. In the first pass, :meth:`begin`
        must be called first.

        Returns:
            The index of the first new position, int64 ``[1]``; the additive attention mask, or None if the
            causal mask is enough; and the keys and values of layer 0, of layer 1, and so on, each [rows,
            key/value heads, allocated positions, head size].
        """
        memory = [held for _, pair in sorted(self._layers.items()) for held in pair]
        is_causal = window is None and self._visible.all()
        penalty = None if is_causal else self._penalty(window, memory[0].shape[2])
        return paddle.to_tensor(np.array([self._past])), penalty, memory

    def _penalty(self, window: int | None, num_columns: int) -> paddle.Tensor:
        if window not in self._penalties:
            mask = cached_mask(self._num_new, num_columns, self._visible, window)
            self._penalties[window] = penalty_of(paddle.to_tensor(mask))
        return self._penalties[window]

    def shorten(self, length: int) -> None:
        self.length = min(self.length, length)

    def select(self, rows: paddle.Tensor) -> None:
        """Replace the rows of the cache: new row ``i`` is a copy of old row ``rows[i]`` (``rows`` int64)."""
        for index, (key, value) in self._layers.items():
            self._layers[index] = (key.index_select(rows, axis=0), value.index_select(rows, axis=0))

    def _write_new_columns(self, memory: paddle.Tensor, new: paddle.Tensor) -> None:
        rows, groups, num_columns, size = memory.shape
        if self._places is None:
            first = np.arange(rows * groups)[:, None] * num_columns
            self._places = paddle.to_tensor((first + np.arange(self._past, self.length)).flatten())
        # A reshaped tensor shares the memory, and a scatter is faster here than slice assignment.
        paddle.scatter_(memory.reshape([-1, size]), self._places, new.reshape([-1, size]))

    def _make_room(self) -> None:
        for index, (key, value) in self._layers.items():
            if key.shape[2] < self.length:
                room = self.length - self._past + ROOM
                self._layers[index] = (
                    _lengthened(key, self._past, room),
                    _lengthened(value, self._past, room),
                )


def _lengthened(held: paddle.Tensor, length: int, room: int) -> paddle.Tensor:
    """Return the first ``length`` positions of ``held``, the keys or values of a layer, followed by ``room``
    positions of zeros. Tensors are [rows, key/value heads, positions, head size]."""
    rows, groups, _, size = held.shape
    zeros = paddle.zeros([rows, groups, room, size], dtype=held.dtype)
    return paddle.concat([held[:, :, :length], zeros], axis=2)
