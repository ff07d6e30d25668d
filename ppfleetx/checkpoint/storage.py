"""Disk access for checkpoints: safetensors files with checksums, small files, crash-safe renames.

Saves access the disk only through this module, so that tests can inject failures here.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ppfleetx.checkpoint.manifest import CHUNK_BYTES, MAX_DOCUMENT_BYTES, DocumentEntry, FileEntry, SliceEntry
from ppfleetx.checkpoint.slices import TensorSlice
from ppfleetx.config.errors import CheckpointError
from ppfleetx.utils.input_files import opened, read_bounded
from ppfleetx.utils.output_files import fsync_dir

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CHECKERS = 2  # threads that verify checksums


def write_safetensors(
    path: Path, relative: str, pieces: Sequence[TensorSlice], metadata: Mapping[str, str] | None = None
) -> tuple[FileEntry, list[SliceEntry]]:
    """Write slices of tensors into one safetensors file, and flush it to disk. ``relative`` is the file's
    path in the checkpoint. ``metadata`` is the `__metadata__` of the header. Returns the manifest's entries
    for the file and for each slice."""
    header = _header(pieces, metadata)
    entries = []
    position = len(header)
    with path.open("wb", buffering=1 << 16) as file:
        write_bytes(file, header)
        for piece in pieces:
            checksums = _write_chunks(file, piece.array())
            place = (relative, position, piece.num_bytes)
            entries.append(SliceEntry(piece.offset, piece.shape, *place, crc32=checksums))
            position += piece.num_bytes
        flush(file)
    return FileEntry(position, len(header), f"{zlib.crc32(header):08x}"), entries


def write_small(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        write_bytes(file, content)
        flush(file)


def write_documents(directory: Path, contents: Mapping[str, bytes]) -> dict[str, DocumentEntry]:
    entries = {}
    for relative, content in contents.items():
        path = directory / relative
        path.parent.mkdir(exist_ok=True)
        write_small(path, content)
        entries[relative] = DocumentEntry(len(content), hashlib.sha256(content).hexdigest())
    for parent in {(directory / relative).parent for relative in contents} - {directory}:
        fsync_dir(parent)
    return entries


def write_bytes(file: BinaryIO, content: bytes | memoryview) -> None:
    file.write(content)


def flush(file: BinaryIO) -> None:
    """Flush an open file to disk."""
    file.flush()
    os.fsync(file.fileno())


def rename(source: Path, target: Path) -> None:
    """Rename a file or directory, and flush the change to disk."""
    source.rename(target)
    fsync_dir(target.parent)


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two directories in one atomic step. Returns False if the system cannot do this.
    Raises OSError for any other failure."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    result = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if result == 0:
        fsync_dir(other.parent)
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def check_file(directory: Path, relative: str, entry: FileEntry) -> None:
    """Raise CheckpointError if the size or the header of a tensor file does not match the manifest's
    ``entry``."""
    path = directory / relative
    with opened(path) as file:
        header = file.read(entry.header_bytes)
        size = file.seek(0, os.SEEK_END)
    if size != entry.num_bytes:
        raise CheckpointError(f"checkpoint file {path} has {size} bytes instead of {entry.num_bytes}")
    if f"{zlib.crc32(header):08x}" != entry.header_crc32:
        raise CheckpointError(f"checkpoint file {path} is damaged: the checksum of its header is wrong")


def read_document(directory: Path, relative: str, entry: DocumentEntry) -> bytes:
    """Read ``config.yaml`` or a tokenizer file. Raises CheckpointError if it does not match ``entry``."""
    path = directory / relative
    content = read_bounded(path, MAX_DOCUMENT_BYTES)
    if len(content) != entry.num_bytes:
        raise CheckpointError(f"checkpoint file {path} has {len(content)} bytes instead of {entry.num_bytes}")
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise CheckpointError(f"checkpoint file {path} is damaged: its checksum is wrong")
    return content


def read_range(
    directory: Path, piece: SliceEntry, start: int, end: int, into: memoryview | None = None
) -> memoryview:
    """Read bytes [start, end) of a tensor slice. Raises CheckpointError if a checksum is wrong.

    Args:
        into: a buffer to read into; allowed only if the range is the whole slice.
    """
    first, last = start // CHUNK_BYTES, -(-end // CHUNK_BYTES)
    begin, stop = first * CHUNK_BYTES, min(last * CHUNK_BYTES, piece.num_bytes)
    # Not bytearray, whose zeroing costs as much as the read.
    buffer = memoryview(np.empty(stop - begin, np.uint8)) if into is None else into
    assert len(buffer) == stop - begin, "a given buffer has to be as long as the piece"
    chunks = (buffer[at : at + CHUNK_BYTES] for at in range(0, len(buffer), CHUNK_BYTES))
    _read_chunks(directory / piece.file, piece, first, chunks)
    return buffer[start - begin : end - begin]


def damage(directory: Path, pieces: Iterable[tuple[str, SliceEntry]]) -> Iterator[str]:
    """Verify the checksums of tensor slices, and yield one sentence for each damaged slice.

    Args:
        pieces: (name for the sentence, manifest entry) of each slice.
    """

    def problem(named: tuple[str, SliceEntry]) -> str | None:
        name, piece = named
        scratch = memoryview(np.empty(min(CHUNK_BYTES, piece.num_bytes), np.uint8))
        sizes = (min(CHUNK_BYTES, piece.num_bytes - at) for at in range(0, piece.num_bytes, CHUNK_BYTES))
        try:
            _read_chunks(directory / piece.file, piece, 0, (scratch[:size] for size in sizes))
        except CheckpointError as error:
            return f"{name}: {error}"
        return None

    # Threads help, because reading and zlib's checksum release the GIL.
    with ThreadPoolExecutor(_CHECKERS, "checksum") as pool:
        yield from filter(None, pool.map(problem, pieces))


def _read_chunks(path: Path, piece: SliceEntry, first: int, chunks: Iterable[memoryview]) -> None:
    """Read consecutive chunks of a tensor slice into buffers, and verify their checksums.

    Args:
        first: the number of the first chunk in the slice.
        chunks: the buffers.
    """
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(piece.start + first * CHUNK_BYTES)
            for number, chunk in enumerate(chunks, start=first):
                _read_full(file, chunk)
                if f"{zlib.crc32(chunk):08x}" != piece.crc32[number]:
                    raise CheckpointError(
                        f"checkpoint file {path} is damaged: wrong checksum in the "
                        f"{len(chunk)} bytes from {piece.start + number * CHUNK_BYTES}"
                    )
    except OSError as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read: {error.strerror}") from error


def _read_full(file: BinaryIO, target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])
        if not count:
            raise OSError(errno.EIO, "the file ends too early")
        done += count


def _write_chunks(file: BinaryIO, array: np.ndarray) -> tuple[str, ...]:
    content = memoryview(array.reshape(-1).view(np.uint8))
    checksums = []
    for start in range(0, len(content), CHUNK_BYTES):
        chunk = content[start : start + CHUNK_BYTES]
        write_bytes(file, chunk)
        checksums.append(f"{zlib.crc32(chunk):08x}")
    return tuple(checksums)


def _header(pieces: Sequence[TensorSlice], metadata: Mapping[str, str] | None) -> bytes:
    table: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for piece in pieces:
        key = base = f"{piece.name}/{piece.state}" if piece.state else piece.name
        number = 1
        while key in table:  # a rank may have several slices of one tensor
            number += 1
            key = f"{base}#{number}"
        end = position + piece.num_bytes
        table[key] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
