"""Tensors in PyTorch's files (``.bin``, ``.pt``), without PyTorch and without running what they hold.

Two layouts: a zip archive with ``data.pkl`` and one member for each storage (since 1.6), and before that
five pickles in a row followed by the storages.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ppfleetx.checkpoint.foreign.lazy import read_bytes
from ppfleetx.checkpoint.foreign.pickle_input import MAX_DESCRIPTION_BYTES
from ppfleetx.checkpoint.foreign.pickled_torch import TORCH_NAMES, TorchStorage, storage_dtype
from ppfleetx.checkpoint.foreign.stand_ins import RefusedPickleError
from ppfleetx.checkpoint.foreign.unpickle import Unpickler
from ppfleetx.checkpoint.slices import NUMPY_OF_DTYPE
from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.utils.foreign_files import opened

_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_LOCAL_HEADER = 30
_LOCAL_SIGNATURE = b"PK\x03\x04"
_MAX_ZIP_DIRECTORY = 16 * 1024 * 1024  # 250,000 members
_IS_ENCRYPTED = 1
_MOST_COMPRESSION = 4  # PyTorch does not compress; numbers that somebody did compress are not a bomb
# What the library raises for damaged archives.
_ZIP_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    RuntimeError,
    ValueError,
    OverflowError,
)


def read_torch_file(path: str | Path, *, record_prefixes: Iterable[str] = ()) -> Any:
    """The object saved in `path`, its tensors as :class:`LazyTensor`.

    Args:
        record_prefixes: objects of classes whose full names begin like this come as ``Record``.

    Raises:
        RefusedPickleError: the file wants to run something; nothing has been run.
        CheckpointError: it cannot be read or is not such a file.
    """
    path, prefixes = Path(path), tuple(record_prefixes)
    with opened(path) as file, naming(path):
        is_zip = file.read(len(_LOCAL_SIGNATURE)) == _LOCAL_SIGNATURE
        file.seek(0)
        return _read_zip(file, path, prefixes) if is_zip else _read_legacy(file, path, prefixes)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name before the messages of what reads it.

    Raises:
        CheckpointError: what was raised within, with the name of the file (RefusedPickleError stays one).
    """
    try:
        yield
    except RefusedPickleError as error:
        refused = RefusedPickleError(error.wanted)
        refused.args = (
            f"{path} is refused: it asks for {error.wanted}. Weights are read from such files, arrays and "
            "containers, and nothing else; nothing of it has been run",
        )
        raise refused from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read_zip(file: BinaryIO, path: Path, prefixes: tuple[str, ...]) -> Any:
    with _zip_damage():
        if not zipfile.is_zipfile(file):
            raise CheckpointError(
                "it begins like an archive of PyTorch, and its end is missing: it is cut off"
            )
        with zipfile.ZipFile(_ShortReads(file)) as archive:
            members = {info.filename: info for info in archive.infolist()}
            if len(members) != len(archive.infolist()):
                raise CheckpointError("two members of the archive have the same name")
            root, content = _description(archive, members)
    storages: dict[str, TorchStorage] = {}

    def persistent(identity: Any) -> TorchStorage:
        dtype, key, count = _storage_identity(identity)
        storage = _noted(storages, key, dtype, count)
        if storage.read is None:
            info = members.get(f"{root}data/{key}")
            if info is None or info.file_size < count * _item_size(dtype):
                what = "is missing" if info is None else "is too short"
                raise CheckpointError(f"the storage {shown(key)} {what}")
            storage.read = _member_reader(path, info)
        return storage

    machine = Unpickler(BytesIO(content), TORCH_NAMES, record_prefixes=prefixes, persistent=persistent)
    return machine.load()


def _description(archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo]) -> tuple[str, bytes]:
    """(directory within the archive, content of ``data.pkl``)."""
    pickles = [name for name in members if name.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise CheckpointError(
            f"a zip archive, but not one of PyTorch: it has {len(pickles)} data.pkl, not one"
        )
    root = pickles[0].removesuffix("data.pkl")
    order = members.get(f"{root}byteorder")
    if order is not None and _read_member(archive, order, 16) != b"little":
        raise CheckpointError("it was written on a big-endian machine")
    return root, _read_member(archive, members[pickles[0]], MAX_DESCRIPTION_BYTES)


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> bytes:
    """A member of at most ``most`` bytes, whatever its size is said to be."""
    _check_readable(info)
    content = b""
    with archive.open(info) as member:
        while len(content) <= most and (part := member.read(1 << 20)):
            content += part
    if len(content) > most:
        raise CheckpointError(
            f"its {shown(info.filename)} is longer than {most} bytes, too long for what it is"
        )
    return content


def _check_readable(info: zipfile.ZipInfo) -> None:
    is_known = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    if not is_known or info.flag_bits & _IS_ENCRYPTED:
        raise CheckpointError(f"its {shown(info.filename)} is encrypted or compressed in an unknown way")


class _ShortReads:
    """A file that refuses to be read by the gigabyte, as ``zipfile`` reads an archive's directory."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self.seekable, self._read = file.seek, file.tell, file.seekable, file.read

    def read(self, count: int = -1) -> bytes:
        most = _MAX_ZIP_DIRECTORY + 1
        content = self._read(most if count < 0 else min(count, most))
        if len(content) == most:
            raise CheckpointError(f"its directory of members has more than {_MAX_ZIP_DIRECTORY} bytes")
        return content


@contextmanager
def _zip_damage() -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except _ZIP_DAMAGE as error:
        raise CheckpointError(f"it is a damaged zip archive ({error})") from error


def _storage_identity(identity: Any) -> tuple[str | None, str, int]:
    """(element type, key, number of elements) of PyTorch's ('storage', class, key, device, count, ...)."""
    if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
        raise RefusedPickleError("a persistent object that is not a storage")
    _, kind, key, _, count = identity[:5]
    if not isinstance(key, str) or type(count) is not int or count < 0:
        raise ValueError("a storage without key or length")
    return storage_dtype(kind), key, count


def _noted(storages: dict[str, TorchStorage], key: str, dtype: str | None, count: int) -> TorchStorage:
    """The storage of a key, which every tensor in it must describe alike."""
    storage = storages.setdefault(key, TorchStorage(dtype, count))
    if (storage.dtype, storage.count) != (dtype, count):
        raise CheckpointError(f"the storage {shown(key)} has two types or lengths")
    return storage


def _item_size(dtype: str | None) -> int:
    return 1 if dtype is None else NUMPY_OF_DTYPE[dtype].itemsize


def _member_reader(path: Path, info: zipfile.ZipInfo) -> Any:
    _check_readable(info)
    is_stored = info.compress_type == zipfile.ZIP_STORED
    if not is_stored and info.file_size > _MOST_COMPRESSION * info.compress_size + 4096:
        raise CheckpointError(
            f"its {shown(info.filename)} would unpack from {info.compress_size} to {info.file_size} bytes, "
            "which no weights do"
        )

    def read(start: int, end: int) -> np.ndarray:
        if is_stored:
            return _stored_range(path, info, start, end)
        with opened(path) as file, naming(path), _zip_damage(), zipfile.ZipFile(file) as archive:
            content = archive.open(info).read(end)
        if len(content) != end:
            raise CheckpointError(f"{path} is damaged: {info.filename} is too short")
        return np.frombuffer(content, np.uint8)[start:]

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


def _read_legacy(file: BinaryIO, path: Path, prefixes: tuple[str, ...]) -> Any:
    storages: dict[str, TorchStorage] = {}

    def persistent(identity: Any) -> TorchStorage:
        dtype, key, count = _storage_identity(identity)
        if len(identity) > 5 and identity[5] is not None:
            raise RefusedPickleError("a view of a storage, as PyTorch before 0.4 wrote them")
        return _noted(storages, key, dtype, count)

    machine = Unpickler(file, TORCH_NAMES, record_prefixes=prefixes, persistent=persistent)
    magic = machine.load()
    if type(magic) is not int or magic != _MAGIC:
        raise CheckpointError("not a file of PyTorch")
    version = machine.load()
    if type(version) is not int or version != _LEGACY_PROTOCOL:
        raise CheckpointError("a file of PyTorch of an unknown version")
    system = machine.load()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise CheckpointError("it was written on a big-endian machine")
    tree, keys = machine.load(), machine.load()
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise CheckpointError("not a sound file of PyTorch: it does not say which storages follow")
    _place_storages(file, path, keys, storages)
    return tree


def _place_storages(file: BinaryIO, path: Path, keys: list[str], storages: dict[str, TorchStorage]) -> None:
    """Find the storages that follow the pickles of the old layout, each after its number of elements."""
    position = file.tell()
    end = file.seek(0, 2)
    for key in keys:
        file.seek(position)
        storage = storages.get(key)
        count = int.from_bytes(file.read(8), "little")
        if storage is None or storage.count != count:
            raise CheckpointError("not a sound file of PyTorch: its storages are not those it announces")
        storage.read = _range_reader(path, position + 8)
        position += 8 + count * _item_size(storage.dtype)
        if position > end:
            break
    if position > end or any(storage.read is None for storage in storages.values()):
        raise CheckpointError("not a sound file of PyTorch: it ends too early")


def _range_reader(path: Path, begin: int) -> Any:
    return lambda start, end: read_bytes(path, begin + start, end - start)
