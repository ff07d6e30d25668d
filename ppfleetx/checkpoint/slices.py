"""Slices of tensors. A box is a rectangular part of a tensor, given as a pair (offset, shape), and a slice is
the data in a box."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod

import numpy as np

Index = tuple[int, ...]

# safetensors element type -> NumPy type with the same bits. NumPy has no bfloat16.
NUMPY_OF_DTYPE = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
# Element types by the names that Paddle and PyTorch share.
DTYPE_OF_NAME = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
SIXTEEN_BIT = ("F16", "BF16")
DTYPE_OF_NUMPY = {held: name for name, held in NUMPY_OF_DTYPE.items() if name != "BF16"}
MODEL, OPTIMIZER = "model", "optimizer"


@dataclass(frozen=True)
class TensorSlice:
    """A part of a tensor, as a rank passes it to the functions that write a checkpoint.

    Attributes:
        name: the parameter's name in the whole model, the same under every plan.
        kind: ``model`` or ``optimizer``.
        dtype: element type, a key of NUMPY_OF_DTYPE.
        global_shape: shape of the whole tensor.
        offset, shape: where this part is in the whole tensor.
        data: an array of `shape`, or a function that makes it. bfloat16 is stored as bits in uint16.
        state: name of the optimizer state (`moment1`, ...); empty for model parameters.
        vocab_dim: the dimension that counts vocabulary entries; None if there is none.
        changes_with_update: whether the next optimizer update changes the array.
        fetch: a function that starts to copy the data to host memory, and returns a function that waits for
            the copy and returns it. ``fetch`` is None if only ``data`` is available.
    """

    name: str
    kind: str
    dtype: str
    global_shape: Index
    offset: Index
    shape: Index
    data: np.ndarray | Callable[[], np.ndarray]
    state: str = ""
    vocab_dim: int | None = None
    changes_with_update: bool = False
    # The next optimizer update does not change the copy, even if the update begins before the copy is
    # complete.
    fetch: Callable[[], Callable[[], np.ndarray]] | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.name, self.state

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.size * NUMPY_OF_DTYPE[self.dtype].itemsize

    def array(self) -> np.ndarray:
        """Return the slice's data as a contiguous little-endian array, as files store it."""
        made = self.data() if callable(self.data) else self.data
        held = np.ascontiguousarray(made, dtype=NUMPY_OF_DTYPE[self.dtype])
        assert held.size == self.size, f"{self.name}: {held.size} elements where {self.size} were announced"
        return held


def whole(name: str, data: np.ndarray, *, kind: str = MODEL, state: str = "") -> TensorSlice:
    """Return the slice that covers a whole tensor. ``data`` may have any type except bfloat16."""
    data = np.asarray(data)
    shape = tuple(data.shape)
    dtype = DTYPE_OF_NUMPY[data.dtype.newbyteorder("<")]
    return TensorSlice(name, kind, dtype, shape, (0,) * len(shape), shape, data, state)


def intersect(one: tuple[Index, Index], other: tuple[Index, Index]) -> tuple[Index, Index] | None:
    """Return the intersection (offset, shape) of two boxes, or None if it is empty."""
    starts = tuple(map(max, one[0], other[0]))
    ends = tuple(min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return None
    return starts, tuple(end - start for start, end in zip(starts, ends, strict=True))


def covers_once(shape: Sequence[int], boxes: Iterable[tuple[Index, Index]]) -> bool:
    """Return whether boxes, pairs (offset, shape), cover an array of ``shape`` without gaps or overlaps."""
    # Boxes tile the array if and only if their corners, with alternating signs, sum to those of the array
    # (inclusion-exclusion). This takes linear time.
    ends: Counter[Index] = Counter()
    whole = ((0,) * len(shape), tuple(shape))
    for weight, box in chain([(-1, whole)], ((1, box) for box in boxes)):
        sides = [((start, 1), (start + length, -1)) for start, length in zip(*box, strict=True)]
        for corner in product(*sides):
            ends[tuple(at for at, _ in corner)] += weight * prod(sign for _, sign in corner)
    return not any(ends.values())
