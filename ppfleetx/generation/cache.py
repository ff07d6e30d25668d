"""The key/value cache: keys and values of past positions.

Shape letters: b rows, g key/value heads, n columns held, k columns allocated, d head size.
"""

from __future__ import annotations

import numpy as np
import paddle

from ppfleetx.nn.masks import cached_mask, penalty_of

ROOM = 32
"""The number of columns that are allocated in advance."""

Pair = tuple[paddle.Tensor, paddle.Tensor]
Layers = dict[int, Pair]
"""Keys and values ``[b, g, n, d]`` of each layer."""


class GrowingCache:
    """The :class:`~ppfleetx.nn.attention.KeyValueCache` of rows that are extended together.

    Memory is allocated for several passes at a time, and each pass writes only its new columns. Copying all
    keys and values in every pass would cost a batch of 8 a sixth of its time on a CPU.
    """

    def __init__(self) -> None:
        self._layers: Layers = {}  # [b, g, k, d], contiguous; columns after the first n are finite
        self._past = self.length = 0  # columns held, n
        self._num_new, self._visible = 0, np.zeros((0, 0), dtype=bool)
        self._row_lengths: np.ndarray | None = None
        self._penalties: dict[int | None, paddle.Tensor] = {}  # masks of this pass, by window
        self._places: paddle.Tensor | None = None  # indices of new columns in [b * g * k, d]

    def extend(self, num_new: int, visible: np.ndarray, row_lengths: np.ndarray | None = None) -> None:
        """Prepare a pass of the model that extends each row by ``num_new`` columns, which every layer will
        pass to :meth:`update`.

        ``visible [b, n + num_new]`` bool are the columns that the new positions of each row may attend to
        (apart from columns after the position itself). In the first pass the layers handle this.
        ``row_lengths [b]`` are the lengths of the rows, if they are not the numbers of their columns.
        """
        self._past, self.length = self.length, self.length + num_new
        if self._past:
            self._make_room()
        self._num_new, self._visible = num_new, visible[:1] if visible.all() else visible
        self._penalties, self._places = {}, None
        self._row_lengths = row_lengths

    def row_lengths(self) -> paddle.Tensor:
        """See ``KeyValueCache``."""
        lengths = self._visible.sum(axis=1) if self._row_lengths is None else self._row_lengths
        return paddle.to_tensor(lengths.astype(np.int64)[:, None])

    def begin(self, num_layers: int, rows: int, groups: int, head_dim: int) -> None:
        """Allocate the :meth:`memory` of a first pass, for code that computes all layers at once."""
        shape = [rows, groups, self.length + ROOM, head_dim]
        self._layers = {layer: (paddle.zeros(shape), paddle.zeros(shape)) for layer in range(num_layers)}

    def update(
        self, layer_index: int, key: paddle.Tensor, value: paddle.Tensor, window: int | None = None
    ) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor | None]:
        """Append ``key, value [b, g, s, d]`` of the new columns; see ``KeyValueCache``."""
        if not self._past:
            self._layers[layer_index] = (key.contiguous(), value.contiguous())
            return key, value, None
        keys, values = self._layers[layer_index]
        self._write(keys, key)
        self._write(values, value)
        return keys, values, self._penalty(window, keys.shape[2])

    @property
    def follows(self) -> bool:
        """Whether the cache held columns before this pass."""
        return bool(self._past)

    def memory(self) -> list[paddle.Tensor]:
        """Keys and values ``[b, g, k, d]`` of each layer in turn, for code that computes all layers at once.
        After :meth:`begin`, and from the second pass on, they have room for the new columns, which this code
        fills."""
        return [held for _, pair in sorted(self._layers.items()) for held in pair]

    def first_new_column(self) -> paddle.Tensor:
        return paddle.to_tensor(np.array([self._past]))

    def penalty_if_needed(self, window: int | None) -> paddle.Tensor | None:
        """The mask to add to the attention scores of a layer with this window; None if each position may
        attend to itself and all earlier positions."""
        if window is None and self._visible.all():
            return None
        return self._penalty(window, self.memory()[0].shape[2])

    def _penalty(self, window: int | None, num_columns: int) -> paddle.Tensor:
        if window not in self._penalties:
            mask = cached_mask(self._num_new, num_columns, self._visible, window)
            self._penalties[window] = penalty_of(paddle.to_tensor(mask))
        return self._penalties[window]

    def shorten(self, length: int) -> None:
        self.length = min(self.length, length)

    def select(self, rows: paddle.Tensor) -> None:
        """Keep, repeat or reorder batch rows: row ``i`` becomes what row ``rows[i]`` was (``rows`` int64)."""
        for index, (key, value) in self._layers.items():
            self._layers[index] = (key.index_select(rows, axis=0), value.index_select(rows, axis=0))

    def _write(self, memory: paddle.Tensor, new: paddle.Tensor) -> None:
        """Write ``new [b, g, s, d]`` into its columns of ``memory [b, g, k, d]``, faster than by index."""
        rows, groups, num_columns, size = memory.shape
        if self._places is None:
            first = np.arange(rows * groups)[:, None] * num_columns
            self._places = paddle.to_tensor((first + np.arange(self._past, self.length)).flatten())
        # A reshaped tensor shares the memory.
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
    """Copy the first ``length`` columns of ``held [b, g, k, d]``, followed by ``room`` columns of zeros."""
    rows, groups, _, size = held.shape
    zeros = paddle.zeros([rows, groups, room, size], dtype=held.dtype)
    return paddle.concat([held[:, :, :length], zeros], axis=2)
