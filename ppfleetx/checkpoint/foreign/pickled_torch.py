"""What PyTorch's files hold beside what `pickled.py` has: storages, and tensors that are views of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ppfleetx.checkpoint.foreign.lazy import LazyTensor
from ppfleetx.checkpoint.foreign.pickled import PLAIN_NAMES, are_sizes, both, only_named
from ppfleetx.checkpoint.foreign.stand_ins import Name, Record, RefusedPickleError, UnsoundPickleError
from ppfleetx.checkpoint.slices import DTYPE_OF_NAME, NUMPY_OF_DTYPE

_STORAGE_DTYPES = {
    "Float": "F32",
    "Double": "F64",
    "Half": "F16",
    "BFloat16": "BF16",
    "Long": "I64",
    "Int": "I32",
    "Short": "I16",
    "Char": "I8",
    "Byte": "U8",
    "Bool": "BOOL",
}


@dataclass(eq=False)
class TorchStorage:
    """A run of elements that tensors are views of.

    `read(start, end)` gives its bytes; it is set once the place in the file is known.
    """

    dtype: str | None
    count: int
    read: Callable[[int, int], np.ndarray] | None = None


def storage_dtype(kind: Any) -> str | None:
    """Element type of the storage class a persistent id names; None for untyped storage (bytes).

    Raises:
        RefusedPickleError: not a storage class of PyTorch with plain numbers.
    """
    name = kind.text if isinstance(kind, Name) else ""
    if name in ("torch.storage.UntypedStorage", "torch.UntypedStorage"):
        return None
    short = name.removeprefix("torch.").removeprefix("cuda.").removesuffix("Storage")
    if not name.endswith("Storage") or short not in _STORAGE_DTYPES:
        raise RefusedPickleError(f"a storage of {name or type(kind).__name__}")
    return _STORAGE_DTYPES[short]


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> LazyTensor:
    return _view(storage, getattr(storage, "dtype", None), offset, size, stride)


def _rebuild_tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> LazyTensor:
    name = dtype.text.removeprefix("torch.") if isinstance(dtype, Name) else ""
    return _view(storage, DTYPE_OF_NAME[name], offset, size, stride)


def _rebuild_parameter(data: Any, *_: Any) -> LazyTensor:
    if not isinstance(data, LazyTensor):
        raise UnsoundPickleError("a parameter without a tensor")
    return data


def _view(storage: Any, dtype: str | None, offset: Any, size: Any, stride: Any) -> LazyTensor:
    """A strided view of a storage. Raises UnsoundPickleError when it reaches outside, or repeats elements."""
    if not isinstance(storage, TorchStorage) or dtype is None:
        raise UnsoundPickleError("a tensor without a storage")
    if not (are_sizes(size) and are_sizes(stride) and are_sizes((offset,)) and len(size) == len(stride)):
        raise UnsoundPickleError("a tensor with an impossible shape")
    held = NUMPY_OF_DTYPE[dtype]
    if storage.dtype is None and storage.count % held.itemsize:
        raise UnsoundPickleError("a storage that ends within an element")
    room = storage.count if storage.dtype else storage.count // held.itemsize
    shape, count = tuple(size), prod(size)
    span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if count else 0
    if offset + span > room or count > room:
        raise UnsoundPickleError("a tensor that is larger than its storage")

    def load() -> np.ndarray:
        assert storage.read is not None, "the storage was never placed"
        content = storage.read(offset * held.itemsize, (offset + span) * held.itemsize).view(held)
        if not count:
            return content.reshape(shape)
        steps = tuple(step * held.itemsize for step in stride)
        return np.lib.stride_tricks.as_strided(content, shape, steps, writeable=False)

    return LazyTensor(dtype, shape, load)


def _attribute(owner: Any, name: Any) -> Record:
    """How some versions of Python write a member of an enumeration: of an absent one only."""
    if not isinstance(owner, Name) or not owner.is_record:
        raise RefusedPickleError("builtins.getattr")
    return owner.build(name)


def _size(dimensions: Any = ()) -> tuple[Any, ...]:
    if not are_sizes(dimensions):
        raise UnsoundPickleError("an impossible shape")
    return tuple(dimensions)


TORCH_NAMES: dict[str, Callable[..., Any]] = PLAIN_NAMES | {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch.Size": _size,
    **dict.fromkeys(both("getattr"), _attribute),
    "torch.device": lambda *names: Record("torch.device", names),
    **{
        name: only_named(name)
        for name in (
            "torch.storage.UntypedStorage",
            "torch.UntypedStorage",
            *(f"torch.{kind}Storage" for kind in _STORAGE_DTYPES),
            *(f"torch.cuda.{kind}Storage" for kind in _STORAGE_DTYPES),
            *(f"torch.{dtype}" for dtype in DTYPE_OF_NAME),
        )
    },
}
