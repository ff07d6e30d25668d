"""Tensors in PyTorch's files (``.bin``, ``.pt``), without PyTorch and without running what they hold.

Two layouts: a zip archive with ``data.pkl`` and one member for each storage (since 1.6), and before that
five pickles in a row followed by the storages.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy import read_bytes
from ppfleetx.checkpoint.pickled import TORCH_NAMES, TorchStorage, storage_dtype
from ppfleetx.checkpoint.slices import NUMPY_OF_DTYPE
from ppfleetx.checkpoint.unpickle import RefusedPickleError, Unpickler
from ppfleetx.config.errors import CheckpointError

_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_MAX_PICKLE = 1 << 30
_LOCAL_HEADER = 30
_LOCAL_SIGNATURE = b"PK\x03\x04"


def read_torch_file(path: str | Path, *, record_prefixes: Iterable[str] = ()) -> Any:
    """The object saved in `path`, its tensors as :class:`LazyTensor`.

    Args:
        record_prefixes: objects of classes whose full names begin like this come as ``Record``.

    Raises:
        RefusedPickleError: the file wants to run something; nothing has been run.
        CheckpointError: it cannot be read or is not such a file.
    """
    path = Path(path)
    prefixes = tuple(record_prefixes)
    try:
        if zipfile.is_zipfile(path):
            return _read_zip(path, prefixes)
        return _read_legacy(path, prefixes)
    except RefusedPickleError as error:
        raise refusal(path, error) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (CheckpointError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{path}: {error}") from error


def refusal(path: Path, error: RefusedPickleError) -> RefusedPickleError:
    """The error with the file and what it means."""
    refused = RefusedPickleError(error.wanted)
    refused.args = (
        f"{path} is refused: it asks for {error.wanted}. Weights are read from such files, arrays and "
        "containers, and nothing else; nothing of it has been run",
    )
    return refused


def _read_zip(path: Path, prefixes: tuple[str, ...]) -> Any:
    archive = zipfile.ZipFile(path)
    with archive:
        members = {info.filename: info for info in archive.infolist()}
        [pickle_name] = [name for name in members if name.rpartition("/")[2] == "data.pkl"] or [None]
        if pickle_name is None:
            raise CheckpointError("a zip archive, but not one of PyTorch: it has no data.pkl")
        root = pickle_name.removesuffix("data.pkl")
        if f"{root}byteorder" in members and archive.read(f"{root}byteorder") != b"little":
            raise CheckpointError("it was written on a big-endian machine")
        if members[pickle_name].file_size > _MAX_PICKLE:
            raise CheckpointError(f"its {pickle_name} is too long to be a description of tensors")
        content = archive.read(pickle_name)
    storages: dict[str, TorchStorage] = {}

    def persistent(identity: Any) -> TorchStorage:
        dtype, key, count = _storage_identity(identity)
        info = members.get(f"{root}data/{key}")
        if key not in storages:
            if info is None or info.file_size < count * _item_size(dtype):
                raise ValueError(f"storage {key} is missing or too short")
            storages[key] = TorchStorage(dtype, count, _member_reader(path, info))
        return storages[key]

    machine = Unpickler(io.BytesIO(content), TORCH_NAMES, record_prefixes=prefixes, persistent=persistent)
    return machine.load()


def _storage_identity(identity: Any) -> tuple[str | None, str, int]:
    """(element type, key, number of elements) of PyTorch's ('storage', class, key, device, count, ...)."""
    if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
        raise RefusedPickleError("a persistent object that is not a storage")
    _, kind, key, _, count = identity[:5]
    if not isinstance(key, str) or type(count) is not int or count < 0:
        raise ValueError("a storage without key or length")
    return storage_dtype(kind), key, count


def _item_size(dtype: str | None) -> int:
    return 1 if dtype is None else NUMPY_OF_DTYPE[dtype].itemsize


def _member_reader(path: Path, info: zipfile.ZipInfo) -> Any:
    def read(start: int, end: int) -> np.ndarray:
        if info.compress_type == zipfile.ZIP_STORED:
            return _stored_range(path, info, start, end)
        with zipfile.ZipFile(path) as archive, archive.open(info) as member:
            return np.frombuffer(member.read(end), np.uint8)[start:]

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


def _read_legacy(path: Path, prefixes: tuple[str, ...]) -> Any:
    storages: dict[str, TorchStorage] = {}

    def persistent(identity: Any) -> TorchStorage:
        dtype, key, count = _storage_identity(identity)
        if len(identity) > 5 and identity[5] is not None:
            raise RefusedPickleError("a view of a storage, as PyTorch before 0.4 wrote them")
        return storages.setdefault(key, TorchStorage(dtype, count))

    with path.open("rb") as file:
        machine = Unpickler(file, TORCH_NAMES, record_prefixes=prefixes, persistent=persistent)
        if machine.load() != _MAGIC:
            raise CheckpointError("not a file of PyTorch")
        if machine.load() != _LEGACY_PROTOCOL:
            raise CheckpointError("a file of PyTorch of an unknown version")
        system = machine.load()
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise CheckpointError("it was written on a big-endian machine")
        tree, keys = machine.load(), machine.load()
        position, end = file.tell(), path.stat().st_size
        for key in keys:
            file.seek(position)
            storage = storages.get(key)
            count = int.from_bytes(file.read(8), "little")
            if storage is None or storage.count != count:
                raise CheckpointError("not a sound file of PyTorch: its storages are not those it announces")
            storage.read = _range_reader(path, position + 8)
            position += 8 + count * _item_size(storage.dtype)
        if position > end or any(storage.read is None for storage in storages.values()):
            raise CheckpointError("not a sound file of PyTorch: it ends too early")
    return tree


def _range_reader(path: Path, begin: int) -> Any:
    return lambda start, end: read_bytes(path, begin + start, end - start)
