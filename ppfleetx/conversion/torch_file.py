"""Read PyTorch files (``.bin``, ``.pt``) without PyTorch, and without running code from the file. Both the
zip format and the older format, from before PyTorch 1.6, are supported."""

from __future__ import annotations

import operator
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ppfleetx.checkpoint.lazy_tensors import LazyTensor, read_bytes
from ppfleetx.checkpoint.slices import DTYPE_OF_NAME, NUMPY_OF_DTYPE
from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.conversion.safe_unpickler import (
    ARRAY_NAMES,
    Record,
    RefusedPickleError,
    StandIn,
    WeightsUnpickler,
    reading,
)
from ppfleetx.utils.input_files import opened

_MAGIC, _LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_LOCAL_HEADER, _LOCAL_SIGNATURE = 30, b"PK\x03\x04"
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


class StorageKind(StandIn):
    """Base class of the classes that replace PyTorch's storage classes when a pickle is read."""

    dtype = ""


class ElementType(StandIn):
    """Base class of the classes that replace ``torch.dtype`` values when a pickle is read."""

    dtype = ""


@dataclass(eq=False)
class TorchStorage(StandIn):
    """A PyTorch storage: a flat array of ``count`` elements. Tensors are views of storages.
    ``read(start, end)`` reads a range of the storage's bytes from the file."""

    dtype: str
    count: int
    read: Callable[[int, int], np.ndarray]


class TorchTensor(LazyTensor):
    """A tensor of a PyTorch file, read lazily. A pickle cannot set its attributes."""

    __setstate__ = StandIn.__setstate__


def read_torch_file(path: str | Path, *, record_prefixes: Iterable[str] = ()) -> Any:
    """Read the object in a PyTorch file. Its tensors are read lazily.

    Args:
        record_prefixes: prefixes of full class names. Objects of these classes are read as :class:`Record`,
            which holds their data.

    Raises RefusedPickleError if the file needs a class or function that is not allowed; CheckpointError if
    the file is damaged.
    """
    path, prefixes = Path(path), tuple(record_prefixes)
    with opened(path) as file, reading(path):
        is_zip = file.read(len(_LOCAL_SIGNATURE)) == _LOCAL_SIGNATURE
        file.seek(0)
        return _read_zip(file, path, prefixes) if is_zip else _read_legacy(file, path, prefixes)


# ---- zip archives


def _read_zip(file: BinaryIO, path: Path, prefixes: tuple[str, ...]) -> Any:
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in members if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise CheckpointError(f"a zip archive with {len(pickles)} data.pkl; PyTorch's have one")
        content = archive.read(pickles[0])
    root = pickles[0].removesuffix("data.pkl")

    def persistent(identity: Any) -> TorchStorage:
        kind, key, count = _storage_id(identity)
        info = members.get(f"{root}data/{key}")
        if info is None or info.file_size < count * NUMPY_OF_DTYPE[kind.dtype].itemsize:
            raise CheckpointError(f"the storage {shown(key)} is missing or too short")
        return TorchStorage(kind.dtype, count, lambda start, end: _read_member(path, info, start, end))

    return WeightsUnpickler(
        BytesIO(content), TORCH_NAMES, record_prefixes=prefixes, persistent=persistent
    ).load()


def _read_member(path: Path, info: zipfile.ZipInfo, start: int, end: int) -> np.ndarray:
    """Read bytes [start, end) of an uncompressed zip member. If this is the whole member, its checksum is
    verified."""
    header = read_bytes(path, info.header_offset, _LOCAL_HEADER).tobytes()
    if not header.startswith(_LOCAL_SIGNATURE) or info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{path} is damaged: {info.filename} is not where the archive says")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    content = read_bytes(path, info.header_offset + _LOCAL_HEADER + names + start, end - start)
    # PyTorch can be configured to omit checksums; it then writes 0.
    if end - start == info.file_size and info.CRC and zlib.crc32(content) != info.CRC:
        raise CheckpointError(f"{path} is damaged: the checksum of {info.filename} is wrong")
    return content


# ---- the layout before 1.6


def _read_legacy(file: BinaryIO, path: Path, prefixes: tuple[str, ...]) -> Any:
    storages: dict[str, TorchStorage] = {}
    starts: dict[str, int] = {}

    def persistent(identity: Any) -> TorchStorage:
        kind, key, count = _storage_id(identity)
        if len(identity) > 5 and identity[5] is not None:
            raise RefusedPickleError("a view of a storage, as PyTorch before 0.4 wrote them")
        read = lambda start, end: read_bytes(path, starts[key] + start, end - start)  # noqa: E731
        return storages.setdefault(key, TorchStorage(kind.dtype, count, read))

    def load() -> Any:
        return WeightsUnpickler(file, TORCH_NAMES, record_prefixes=prefixes, persistent=persistent).load()

    if load() != _MAGIC or load() != _LEGACY_PROTOCOL:
        raise CheckpointError("not a PyTorch file, or one of an unknown version")
    load()  # sizes and byte order of the machine that wrote the file
    tree, keys = load(), load()
    # The storages follow. Each is preceded by its number of elements.
    position, end = file.tell(), file.seek(0, os.SEEK_END)
    for key in keys:
        file.seek(position)
        if key not in storages or int.from_bytes(file.read(8), "little") != storages[key].count:
            raise CheckpointError("its storages do not match its list of storages")
        starts[key] = position + 8
        position += 8 + storages[key].count * NUMPY_OF_DTYPE[storages[key].dtype].itemsize
    if position > end or starts.keys() != storages.keys():
        raise CheckpointError("it ends too early")
    return tree


# ---- storages and tensors


def _storage_id(identity: Any) -> tuple[type[StorageKind], str, int]:
    """Parse the persistent id of a storage. Returns the class of the storage, its key, and its number of
    elements."""
    if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
        raise RefusedPickleError("a persistent object that is not a storage")
    _, kind, key, _, count = identity[:5]
    if not (isinstance(kind, type) and issubclass(kind, StorageKind)):
        raise RefusedPickleError("a storage of another class")
    return kind, str(key), operator.index(count)


def _rebuild_tensor(storage: TorchStorage, offset: int, size: Any, stride: Any, *_: Any) -> LazyTensor:
    """Make a lazy tensor that is a strided view of a storage. Stands in for PyTorch's function of this name.
    Raises CheckpointError if the view exceeds the storage."""
    held = NUMPY_OF_DTYPE[storage.dtype]
    offset, shape, stride = operator.index(offset), _numbers(size), _numbers(stride)
    count = prod(shape)
    span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if count else 0
    if min((offset, *shape, *stride)) < 0 or offset + span > storage.count or count > storage.count:
        raise CheckpointError("a tensor in it is larger than its storage")

    def load() -> np.ndarray:
        content = storage.read(offset * held.itemsize, (offset + span) * held.itemsize)
        content = content.view(held)
        if not count:
            return content.reshape(shape)
        steps = tuple(step * held.itemsize for step in stride)
        return np.lib.stride_tricks.as_strided(content, shape, steps, writeable=False)

    return TorchTensor(storage.dtype, shape, load)


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(map(operator.index, values))


def _rebuild_parameter(data: LazyTensor, *_: Any) -> LazyTensor:
    return data


def _member(owner: Any, name: str) -> Record:
    """Stand in for ``getattr`` in a pickle. Some pickles name an enum member as ``getattr(class, name)``;
    for this call, return a :class:`Record`. Raises RefusedPickleError for any other call."""
    if not (isinstance(owner, type) and issubclass(owner, Record)):
        raise RefusedPickleError("builtins.getattr")
    return owner(name)


TORCH_NAMES: dict[str, Any] = ARRAY_NAMES | {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "builtins.getattr": _member,
    "torch.Size": tuple,
    "torch.device": Record,
    **{
        f"torch.{place}{kind}Storage": type(kind, (StorageKind,), {"dtype": dtype})
        for place in ("", "cuda.")
        for kind, dtype in _STORAGE_DTYPES.items()
    },
    **{
        f"torch.{name}": type(name, (ElementType,), {"dtype": dtype}) for name, dtype in DTYPE_OF_NAME.items()
    },
}
