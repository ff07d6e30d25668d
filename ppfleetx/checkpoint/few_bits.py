"""Weights of 8 and 4 bits as the float32 numbers that they stand for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ppfleetx.checkpoint.lazy import LazyTensor

_STORED = {"I8": 1, "U8": 2}
"""Element types of small weights -> input features in one row."""


def widened(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """``tensors`` without scales, and with float32 in the place of integers; read when they are asked for.

    Args:
        tensors: by canonical name. ``X.weight``, int8 ``[k, n]`` or pairs uint8 ``[k / 2, n]``, has
            ``X.scale``: ``[g, n]`` for g groups of input features, or ``[k, 1]`` for the rows of a table.
    """
    scales = {
        name: f"{name.removesuffix('.weight')}.scale"
        for name, tensor in tensors.items()
        if tensor.dtype in _STORED
    }
    return {
        name: _wide(tensor, tensors[scales[name]]) if name in scales else tensor
        for name, tensor in tensors.items()
        if name not in scales.values()
    }


def _wide(stored: LazyTensor, scale: LazyTensor) -> LazyTensor:
    rows, columns = stored.shape
    shape = (rows * _STORED[stored.dtype], columns)

    def load() -> np.ndarray:
        levels = stored.read()
        if stored.dtype == "U8":
            halves = np.stack([levels & 15, levels >> 4], axis=1).reshape(shape).astype(np.int8)
            levels = np.where(halves > 7, halves - 16, halves)
        values, steps = levels.astype(np.float32), scale.read().astype(np.float32)
        if steps.shape[1] != columns:
            return values * steps
        return (values.reshape(len(steps), -1, columns) * steps[:, np.newaxis]).reshape(shape)

    return LazyTensor("F32", shape, load)
