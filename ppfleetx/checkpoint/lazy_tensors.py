"""Tensors that are read from files only when they are needed, and conversion between element types."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from ppfleetx.checkpoint.slices import NUMPY_OF_DTYPE, Index
from ppfleetx.config.errors import CheckpointError
from ppfleetx.utils.bfloat16 import from_bfloat16, to_bfloat16
from ppfleetx.utils.input_files import opened

FLOAT_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
NAME_OF_DTYPE = {dtype: name for name, dtype in FLOAT_DTYPES.items()}


@dataclass(frozen=True)
class LazyTensor:
    """A tensor with known element type and shape, whose data is read by calling ``load``.

    ``load`` may return a strided view. It returns bfloat16 as bits in uint16.
    """

    dtype: str
    shape: Index
    load: Callable[[], np.ndarray]

    def read(self) -> np.ndarray:
        values = self.load()
        assert tuple(values.shape) == tuple(self.shape), f"{values.shape} instead of {self.shape}"
        return values

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * NUMPY_OF_DTYPE[self.dtype].itemsize

    def cast(self, dtype: str) -> LazyTensor:
        if dtype == self.dtype:
            return self
        return LazyTensor(dtype, self.shape, lambda: cast(self.read(), self.dtype, dtype))


class KeptTensor:
    """A tensor that is read from its file once and then kept in memory. The memory is freed after
    ``readings`` calls of `read`."""

    def __init__(self, tensor: LazyTensor, readings: int) -> None:
        self._tensor, self._readings, self._left = tensor, readings, 0
        self._values: np.ndarray | None = None

    def read(self) -> np.ndarray:
        if self._values is None:
            self._values, self._left = self._tensor.read(), self._readings
        values, self._left = self._values, self._left - 1
        if not self._left:
            self._values = None
        return values


def derive(
    parts: Sequence[LazyTensor], shape: Sequence[int], make: Callable[..., np.ndarray], name: str
) -> LazyTensor:
    """Return a lazy tensor of shape ``shape``. Reading it reads the tensors ``parts`` and calls ``make`` with
    their arrays. Raises CheckpointError if the element types of ``parts`` differ.

    Args:
        name: the name of the new tensor, for the error message.
    """
    kinds = sorted({part.dtype for part in parts})
    if len(kinds) != 1:
        raise CheckpointError(f"{name}: its parts have different element types: {', '.join(kinds)}")
    return LazyTensor(kinds[0], tuple(shape), lambda: make(*(part.read() for part in parts)))


def cast(values: np.ndarray, stored: str, wanted: str) -> np.ndarray:
    """Convert an array from the element type ``stored`` to the element type ``wanted``, which are named as in
    safetensors. bfloat16 arrays are passed and returned as bits in uint16."""
    if stored == wanted:
        return values
    if stored == "BF16":
        values = from_bfloat16(values)
    if wanted == "BF16":
        return to_bfloat16(np.ascontiguousarray(values, np.float32))
    return values.astype(NUMPY_OF_DTYPE[wanted])


def finite(tensor: LazyTensor, name: str, place: str) -> LazyTensor:
    """Return the tensor with a check: reading it raises CheckpointError if it has a NaN or an infinity."""

    def load() -> np.ndarray:
        with np.errstate(over="ignore"):  # an overflow in a cast is detected below
            values = tensor.read()
        count = values.size - np.count_nonzero(_is_finite(values, tensor.dtype))
        if count:
            limit = ", which holds nothing beyond 65504" if tensor.dtype == "F16" else ""
            raise CheckpointError(
                f"{place}: {name} is NaN or infinite in {count} of {values.size} numbers as "
                f"{NAME_OF_DTYPE[tensor.dtype]}{limit}"
            )
        return values

    return LazyTensor(tensor.dtype, tensor.shape, load) if tensor.dtype in NAME_OF_DTYPE else tensor


def _is_finite(values: np.ndarray, dtype: str) -> np.ndarray:
    return (values & 0x7F80) != 0x7F80 if dtype == "BF16" else np.isfinite(values)


def read_bytes(path: Path, start: int, length: int) -> np.ndarray:
    """Read ``length`` bytes of the file ``path`` from position ``start``, as uint8. Raises CheckpointError if
    the file is too short."""
    with opened(path) as file:
        if start + length > file.seek(0, os.SEEK_END):  # check before allocating memory
            raise CheckpointError(f"{path} ends too early")
        file.seek(start)
        content = np.empty(length, np.uint8)
        if file.readinto(memoryview(content)) != length:
            raise CheckpointError(f"{path} ends too early")
    return content
