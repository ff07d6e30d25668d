"""Keys and values of past positions."""

from __future__ import annotations

import paddle


class ConcatCache:
    """The :class:`~ppfleetx.nn.attention.KeyValueCache` that grows by concatenation.

    Measured as fast on CPU as writing into preallocated memory, and it needs no limit in advance.
    """

    def __init__(self) -> None:
        self._layers: dict[int, tuple[paddle.Tensor, paddle.Tensor]] = {}

    @property
    def length(self) -> int:
        """Positions held; the same for all layers between two calls of the model."""
        return next(iter(self._layers.values()))[0].shape[2] if self._layers else 0

    def update(
        self, layer_index: int, key: paddle.Tensor, value: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Append ``key, value [b, g, s, d]``; give those of all positions ``[b, g, length + s, d]``."""
        if layer_index in self._layers:
            past_key, past_value = self._layers[layer_index]
            key = paddle.concat([past_key, key], axis=2)
            value = paddle.concat([past_value, value], axis=2)
        self._layers[layer_index] = (key, value)
        return key, value

    def shorten(self, length: int) -> None:
        """Forget what comes after the first ``length`` positions."""
        if self.length > length:
            for index, (key, value) in self._layers.items():
                self._layers[index] = (key[:, :, :length], value[:, :, :length])

    def select(self, rows: paddle.Tensor) -> None:
        """Keep, repeat or reorder batch rows: row ``i`` becomes what row ``rows[i]`` was (``rows`` int64)."""
        for index, (key, value) in self._layers.items():
            self._layers[index] = (key.index_select(rows, axis=0), value.index_select(rows, axis=0))
