"""Flat arrays of whole numbers in NumPy's files, which may claim anything about themselves.

``numpy.load`` takes a header at its word and makes room for a million million numbers. Here a header is read
for what flat arrays of integers need, and believed as far as the file is long.
"""

from __future__ import annotations

import ast
import contextlib
import mmap
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ppfleetx.config.errors import DataError, shown
from ppfleetx.utils.foreign_files import file_status, opened

_MAGIC = b"\x93NUMPY"
_LENGTHS = {(1, 0): struct.Struct("<H"), (2, 0): struct.Struct("<I"), (3, 0): struct.Struct("<I")}
_MAX_HEADER_BYTES = 10_000
_INTEGERS = re.compile(r"[<>|=]?[iu][1248]")
_READ_BYTES = 1 << 20
_MAX_ZIP_DIRECTORY = 64 << 10  # of some hundred members; such a file has three
# Numbers of documents and lengths that repeat shrink to a hundredth and less; beyond this it must be little.
_MAX_EXPANSION, _FREE_BYTES = 32, 64 << 20
_ZIP_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, OverflowError, OSError
)  # fmt: skip


def map_npy(path: Path) -> np.ndarray:
    """The array of a ``.npy`` file, memory-mapped.

    Raises:
        DataError: it cannot be read, is no flat array of integers, or is not as long as it says.
    """
    size = file_status(path, DataError).st_size
    with opened(path, DataError) as file:
        dtype, count, begin = _header(file, str(path))
        expected = begin + count * dtype.itemsize
        if size != expected:
            kind = "truncated" if size < expected else "too long"
            raise DataError(
                f"{path} is {kind}: it has {size:,} bytes, and {count:,} numbers of {dtype} need {expected:,}"
            )
        if not count:
            return np.empty(0, dtype)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, dtype, count, begin)


def read_npz(path: Path, names: Collection[str], room: int) -> dict[str, np.ndarray]:
    """Those of the named arrays that an ``.npz`` file has.

    Args:
        path: the file.
        names: arrays that may be wanted; others are not looked at.
        room: bytes of other files of the corpus, which may explain large arrays in a small archive.

    Raises:
        DataError: it cannot be read, is damaged, or holds something else than flat arrays of integers.
    """
    room = _FREE_BYTES + _MAX_EXPANSION * (file_status(path, DataError).st_size + room)
    with opened(path, DataError) as file, _zip_damage(path), zipfile.ZipFile(_BoundedReads(file)) as archive:
        members = archive.infolist()
        if len({info.filename for info in members}) != len(members):
            raise DataError(f"{path} is damaged: two of its arrays have the same name")
        found = {info.filename.removesuffix(".npy"): info for info in members}
        return {name: _member(archive, found[name], path, room) for name in names if name in found}


@contextlib.contextmanager
def _zip_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except _ZIP_DAMAGE as error:
        raise DataError(f"{path} cannot be read: it is a damaged archive ({shown(str(error))})") from error


class _BoundedReads:
    """A file that is not read by the gigabyte, as ``zipfile`` reads the directory of an archive."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self.seekable, self._read = file.seek, file.tell, file.seekable, file.read

    def read(self, count: int = -1) -> bytes:
        if count > _MAX_ZIP_DIRECTORY:
            raise ValueError(f"its directory has more than {_MAX_ZIP_DIRECTORY:,} bytes")
        return self._read(_MAX_ZIP_DIRECTORY if count < 0 else count)


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path, room: int) -> np.ndarray:
    """One array of an archive."""
    place = f"{path}, array {shown(info.filename)},"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"{place} cannot be read: it is compressed in a way that NumPy does not use")
    with archive.open(info) as stream:
        dtype, count, begin = _header(stream, place)
        if info.file_size != begin + count * dtype.itemsize or count * dtype.itemsize > room:
            raise DataError(
                f"{place} is damaged: {count:,} numbers of {dtype} do not fit into its "
                f"{min(info.file_size, room):,} bytes"
            )
        array = np.empty(count, dtype)
        view, position = array.view(np.uint8), 0
        while part := stream.read(_READ_BYTES):
            view[position : position + len(part)] = np.frombuffer(part, np.uint8)
            position += len(part)
        if position != view.size:
            raise DataError(f"{place} is truncated")
    return array


def _header(stream: Any, place: str) -> tuple[np.dtype, int, int]:
    """(type, number of values, where they begin) as the first bytes of a ``.npy`` file tell.

    The format is in ``numpy/lib/format.py``: magic, version, length of the description, the description.
    """
    start = stream.read(8)
    if start[:6] != _MAGIC or tuple(start[6:]) not in _LENGTHS:
        raise DataError(f"{place} cannot be read: it is no file of NumPy's, or of a newer version")
    number = _LENGTHS[tuple(start[6:])]
    (length,) = number.unpack(stream.read(number.size).ljust(number.size, b"\xff"))
    text = stream.read(length) if length <= _MAX_HEADER_BYTES else b""
    if length > _MAX_HEADER_BYTES or len(text) != length:
        raise DataError(f"{place} cannot be read: its header is truncated or too long")
    try:
        with warnings.catch_warnings(action="ignore"):
            described = ast.literal_eval(text.decode("latin1").strip())
        kind, shape = described["descr"], described["shape"]
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise DataError(f"{place} cannot be read: its header is damaged") from error
    is_flat = isinstance(shape, tuple) and len(shape) == 1 and type(shape[0]) is int and shape[0] >= 0
    if not is_flat or not isinstance(kind, str) or not _INTEGERS.fullmatch(kind):
        what = f"shape {shown(shape)} of {shown(kind)}"
        raise DataError(f"{place} must be a flat array of integers, not one of {what}")
    return np.dtype(kind), shape[0], 8 + number.size + length
