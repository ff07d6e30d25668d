"""Tensors in PyTorch's files (``.bin``, ``.pt``), without PyTorch and without running what they hold.

Two layouts: a zip archive with ``data.pkl`` and one member for each storage (since 1.6), and before that
five pickles in a row followed by the storages. Storages stay in the file until a tensor is read.
"""

from __future__ import annotations

import operator
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ppfleetx.checkpoint.lazy import LazyTensor, read_bytes
from ppfleetx.checkpoint.slices import DTYPE_OF_NAME, NUMPY_OF_DTYPE
from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.conversion.pickles import (
    ARRAY_NAMES,
    Kind,
    Record,
    RefusedPickleError,
    WeightsUnpickler,
    reading,
)
from ppfleetx.utils.foreign_files import opened

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
# What the library raises for damaged archives.
_ZIP_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OverflowError)


class StorageKind(Kind):
    """A class of storages."""

    dtype: str | None = None


class ElementType(Kind):
    """A ``torch.dtype``."""

    dtype = ""


@dataclass(eq=False)
class TorchStorage(Kind):
    """A run of elements that tensors are views of.

    `read(start, end)` gives its bytes; it is set once the place in the file is known.
    """

    dtype: str | None
    count: int
    read: Callable[[int, int], np.ndarray] | None = None


class TorchTensor(LazyTensor):
    """A view of a storage; a pickle cannot give it another state."""

    __setstate__ = Kind.__setstate__


def read_torch_file(path: str | Path, *, record_prefixes: Iterable[str] = ()) -> Any:
    """The object saved in `path`, its tensors as :class:`LazyTensor`.

    Args:
        record_prefixes: objects of classes whose full names begin like this come as ``Record``.

    Raises:
        RefusedPickleError: the file wants to run something; nothing has been run.
        CheckpointError: it cannot be read or is not such a file.
    """
    path, prefixes = Path(path), tuple(record_prefixes)
    with opened(path) as file, reading(path):
        is_zip = file.read(len(_LOCAL_SIGNATURE)) == _LOCAL_SIGNATURE
        file.seek(0)
        return _read_zip(file, path, prefixes) if is_zip else _read_legacy(file, path, prefixes)


# -- archives


def _read_zip(file: BinaryIO, path: Path, prefixes: tuple[str, ...]) -> Any:
    if not zipfile.is_zipfile(file):
        raise CheckpointError("it begins like an archive of PyTorch, and its end is missing: it is cut off")
    with _zip_damage(), zipfile.ZipFile(file) as archive:
        members = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in members if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise CheckpointError(
                f"a zip archive, but not one of PyTorch: it has {len(pickles)} data.pkl, not one"
            )
        root = pickles[0].removesuffix("data.pkl")
        if f"{root}byteorder" in members and archive.read(f"{root}byteorder") != b"little":
            raise CheckpointError("it was written on a big-endian machine")
        content = archive.read(pickles[0])
    storages: dict[str, TorchStorage] = {}

    def persistent(identity: Any) -> TorchStorage:
        storage, key = _storage(storages, identity)
        if storage.read is None:
            info = members.get(f"{root}data/{key}")
            if info is None or info.file_size < storage.count * _item_size(storage.dtype):
                what = "is missing" if info is None else "is too short"
                raise CheckpointError(f"the storage {shown(key)} {what}")
            storage.read = _member_reader(path, info)
        return storage

    return WeightsUnpickler(
        BytesIO(content), TORCH_NAMES, record_prefixes=prefixes, persistent=persistent
    ).load()


@contextmanager
def _zip_damage() -> Iterator[None]:
    try:
        yield
    except _ZIP_DAMAGE as error:
        raise CheckpointError(f"it is a damaged zip archive ({error})") from error


def _member_reader(path: Path, info: zipfile.ZipInfo) -> Callable[[int, int], np.ndarray]:
    def read(start: int, end: int) -> np.ndarray:
        if info.compress_type == zipfile.ZIP_STORED:
            return _stored_range(path, info, start, end)
        with opened(path) as file, reading(path), _zip_damage(), zipfile.ZipFile(file) as archive:
            return np.frombuffer(archive.read(info), np.uint8)[start:end]

    return read


def _stored_range(path: Path, info: zipfile.ZipInfo, start: int, end: int) -> np.ndarray:
    """Bytes of an uncompressed member; the archive's checksum is compared when they are all of it."""
    header = read_bytes(path, info.header_offset, _LOCAL_HEADER).tobytes()
    if not header.startswith(_LOCAL_SIGNATURE):
        raise CheckpointError(f"{path} is damaged: {info.filename} is not where the archive says")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    content = read_bytes(path, info.header_offset + _LOCAL_HEADER + names + start, end - start)
    # PyTorch can be told to leave the checksums out; it then writes 0.
    if end - start == info.file_size and info.CRC and zlib.crc32(content) != info.CRC:
        raise CheckpointError(f"{path} is damaged: the checksum of {info.filename} is wrong")
    return content


# -- the layout before archives


def _read_legacy(file: BinaryIO, path: Path, prefixes: tuple[str, ...]) -> Any:
    storages: dict[str, TorchStorage] = {}

    def persistent(identity: Any) -> TorchStorage:
        if len(identity) > 5 and identity[5] is not None:
            raise RefusedPickleError("a view of a storage, as PyTorch before 0.4 wrote them")
        return _storage(storages, identity)[0]

    def load() -> Any:
        return WeightsUnpickler(file, TORCH_NAMES, record_prefixes=prefixes, persistent=persistent).load()

    if load() != _MAGIC:
        raise CheckpointError("not a file of PyTorch")
    if load() != _LEGACY_PROTOCOL:
        raise CheckpointError("a file of PyTorch of an unknown version")
    if load().get("little_endian") is not True:
        raise CheckpointError("it was written on a big-endian machine")
    tree, keys = load(), load()
    _place_storages(file, path, keys, storages)
    return tree


def _place_storages(file: BinaryIO, path: Path, keys: list[str], storages: dict[str, TorchStorage]) -> None:
    """Find the storages that follow the pickles of the old layout, each after its number of elements."""
    position = file.tell()
    end = file.seek(0, 2)
    for key in keys:
        file.seek(position)
        storage, count = storages.get(key), int.from_bytes(file.read(8), "little")
        if storage is None or storage.count != count:
            raise CheckpointError("not a sound file of PyTorch: its storages are not those it announces")
        storage.read = _range_reader(path, position + 8)
        position += 8 + count * _item_size(storage.dtype)
    if position > end or any(storage.read is None for storage in storages.values()):
        raise CheckpointError("not a sound file of PyTorch: it ends too early")


def _range_reader(path: Path, begin: int) -> Callable[[int, int], np.ndarray]:
    return lambda start, end: read_bytes(path, begin + start, end - start)


# -- storages and tensors


def _storage(storages: dict[str, TorchStorage], identity: Any) -> tuple[TorchStorage, str]:
    """The storage of PyTorch's ('storage', class, key, device, count, ...), and its key."""
    if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
        raise RefusedPickleError("a persistent object that is not a storage")
    _, kind, key, _, count = identity[:5]
    if not (isinstance(kind, type) and issubclass(kind, StorageKind)):
        raise RefusedPickleError("a storage of another class")
    count = operator.index(count)
    storage = storages.setdefault(key, TorchStorage(kind.dtype, count))
    if (storage.dtype, storage.count) != (kind.dtype, count):
        raise CheckpointError(f"the storage {shown(key)} has two types or lengths")
    return storage, key


def _item_size(dtype: str | None) -> int:
    return 1 if dtype is None else NUMPY_OF_DTYPE[dtype].itemsize


def _rebuild_tensor(storage: TorchStorage, offset: int, size: Any, stride: Any, *_: Any) -> LazyTensor:
    return _view(storage, storage.dtype, offset, size, stride)


def _rebuild_tensor_v3(
    storage: TorchStorage, offset: int, size: Any, stride: Any, _grad: Any, _hooks: Any, kind: Any, *_: Any
) -> LazyTensor:
    return _view(storage, kind.dtype, offset, size, stride)


def _view(storage: TorchStorage, dtype: str, offset: int, size: Any, stride: Any) -> LazyTensor:
    """A strided view of a storage. Raises CheckpointError when it reaches outside, or repeats elements."""
    held = NUMPY_OF_DTYPE[dtype]
    room = storage.count * _item_size(storage.dtype) // held.itemsize
    # Python's own numbers, which do not overflow.
    offset, shape, stride = operator.index(offset), _numbers(size), _numbers(stride)
    count = prod(shape)
    span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if count else 0
    if min((offset, *shape, *stride)) < 0 or offset + span > room or count > room:
        raise CheckpointError("a tensor in it is larger than its storage")

    def load() -> np.ndarray:
        assert storage.read is not None, "the storage was never placed"
        content = storage.read(offset * held.itemsize, (offset + span) * held.itemsize)
        if content.nbytes != span * held.itemsize:
            raise CheckpointError("a storage is shorter than its archive says")
        content = content.view(held)
        if not count:
            return content.reshape(shape)
        steps = tuple(step * held.itemsize for step in stride)
        return np.lib.stride_tricks.as_strided(content, shape, steps, writeable=False)

    return TorchTensor(dtype, shape, load)


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(map(operator.index, values))


def _rebuild_parameter(data: LazyTensor, *_: Any) -> LazyTensor:
    return data


def _member(owner: Any, name: str) -> Record:
    """How some versions of Python write a member of an enumeration: of an absent one only."""
    if not (isinstance(owner, type) and issubclass(owner, Record)):
        raise RefusedPickleError("builtins.getattr")
    return owner(name)


TORCH_NAMES: dict[str, Any] = ARRAY_NAMES | {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "builtins.getattr": _member,
    "torch.Size": tuple,
    "torch.device": Record,
    "torch.storage.UntypedStorage": StorageKind,
    "torch.UntypedStorage": StorageKind,
    **{
        f"torch.{place}{kind}Storage": type(kind, (StorageKind,), {"dtype": dtype})
        for place in ("", "cuda.")
        for kind, dtype in _STORAGE_DTYPES.items()
    },
    **{
        f"torch.{name}": type(name, (ElementType,), {"dtype": dtype}) for name, dtype in DTYPE_OF_NAME.items()
    },
}
