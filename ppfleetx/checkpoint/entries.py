"""What a manifest says of files, tensors and slices, and what makes it believable.

A manifest is sealed against accidents, not against somebody who writes a wrong one and seals it. So nothing
in it is taken on trust: slices have to cover each element of each tensor once, and each byte of each file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import PurePosixPath
from typing import Any

from ppfleetx.checkpoint.slices import (
    MODEL,
    NUMPY_OF_DTYPE,
    OPTIMIZER,
    Index,
    covers_once,
)
from ppfleetx.config.errors import shown

CHUNK_BYTES = 4 * 1024 * 1024
MAX_HEADER_BYTES = 8 + 100_000_000  # of a safetensors file, with its length
_MAX_DIMS = 32  # NumPy's
_MAX_CORNERS = 2_000_000
_CRC32, _SHA256 = re.compile(r"[0-9a-f]{8}"), re.compile(r"[0-9a-f]{64}")
_DOCUMENT = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*/)?[A-Za-z0-9_-][A-Za-z0-9._-]*")
MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
_MAX_DOCUMENTS = 64


@dataclass(frozen=True)
class SliceEntry:
    """Where one piece of a tensor lies.

    `start` is the position of its first byte in `file`; `crc32` has one checksum for each
    `CHUNK_BYTES` of its bytes (the last chunk may be shorter). Nothing uses `flat`, a key of the format.
    """

    offset: Index
    shape: Index
    file: str
    start: int
    num_bytes: int
    crc32: tuple[str, ...]
    flat: None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class DocumentEntry:
    """A small file that describes the model: `config.yaml`, or one of the tokenizer's."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the model or of the optimizer, and its pieces. `vocab_dim` as in TensorSlice."""

    name: str
    kind: str
    state: str
    dtype: str
    shape: Index
    slices: tuple[SliceEntry, ...]
    vocab_dim: int | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """(kind, name, state), which no other tensor of a checkpoint has."""
        return self.kind, self.name, self.state

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.kind} {self.name} {self.state}".rstrip()

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * NUMPY_OF_DTYPE[self.dtype].itemsize


@dataclass(frozen=True)
class FileEntry:
    """A safetensors file: its size, and size and CRC-32 of its header (length field included)."""

    num_bytes: int
    header_bytes: int
    header_crc32: str


def read_files(listed: Any) -> dict[str, FileEntry]:
    """The `files` of a manifest. Raises ValueError for what cannot be."""
    if not isinstance(listed, dict):
        raise ValueError("files is not an object")
    files = {}
    for path, entry in listed.items():
        where = f"file {shown(path)}"
        parts = PurePosixPath(path).parts
        if not parts or PurePosixPath(path).is_absolute() or ".." in parts or "\0" in path:
            raise ValueError(f"it names the file {shown(path)}, which is not inside the checkpoint")
        _check_keys(entry, ("num_bytes", "header_bytes", "header_crc32"), where)
        file = FileEntry(**entry)
        if not (_is_count(file.num_bytes) and _is_count(file.header_bytes) and _is_crc(file.header_crc32)):
            raise ValueError(f"{where} has no proper sizes and checksum")
        if file.header_bytes > min(file.num_bytes, MAX_HEADER_BYTES):
            raise ValueError(f"{where} has {file.num_bytes} bytes, and a header of {file.header_bytes}")
        files[path] = file
    return files


def read_documents(listed: Any) -> dict[str, DocumentEntry]:
    """The `documents` of a manifest. Raises ValueError for what cannot be."""
    if not isinstance(listed, dict) or len(listed) > _MAX_DOCUMENTS:
        raise ValueError("documents is not an object, or has too many")
    documents = {}
    for path, entry in listed.items():
        where = f"document {shown(path)}"
        if not _DOCUMENT.fullmatch(path) or len(path) > 255:
            raise ValueError(f"{where} is not a file of the checkpoint or of a directory in it")
        _check_keys(entry, DocumentEntry.__dataclass_fields__, where)
        size, digest = entry["num_bytes"], entry["sha256"]
        if not (_is_count(size) and size <= MAX_DOCUMENT_BYTES):
            raise ValueError(f"{where} has {shown(size)} bytes; the most are {MAX_DOCUMENT_BYTES}")
        if not (isinstance(digest, str) and _SHA256.fullmatch(digest)):
            raise ValueError(f"{where} has no proper checksum")
        documents[path] = DocumentEntry(size, digest)
    return documents


def read_tensors(listed: Any) -> list[TensorEntry]:
    """The `tensors` of a manifest, each for itself. Raises ValueError for what cannot be."""
    if not isinstance(listed, list):
        raise ValueError("tensors is not a list")
    tensors = []
    for number, entry in enumerate(listed):
        _check_keys(entry, TensorEntry.__dataclass_fields__, f"tensor {number}")
        for key in ("name", "kind", "state", "dtype"):
            if not isinstance(entry[key], str):
                raise ValueError(f"tensor {number} has the {key} {shown(entry[key])}")
        label = f"{entry['kind']} {entry['name']} {entry['state']}".rstrip()
        where = f"tensor {shown(label)}"
        if not isinstance(entry["slices"], list):
            raise ValueError(f"{where} has no list of slices")
        slices = tuple(_slice(piece, where) for piece in entry["slices"])
        shape = _index(entry["shape"], where)
        tensors.append(TensorEntry(**{**entry, "shape": shape, "slices": slices}))
        if problem := _problem(tensors[-1]):
            raise ValueError(f"{where}: {problem}")
    return tensors


def check_together(files: Mapping[str, FileEntry], tensors: Sequence[TensorEntry]) -> None:
    """Raise ValueError unless each element of a tensor and each byte of a file is in exactly one slice."""
    if len({entry.key for entry in tensors}) != len(tensors):
        raise ValueError("a tensor is listed twice")
    _check_cover(tensors)
    ranges: dict[str, list[tuple[int, int]]] = {path: [] for path in files}
    for entry in tensors:
        for piece in entry.slices:
            if piece.file not in files:
                raise ValueError(f"{entry.label} lies in {shown(piece.file)}, which is not listed")
            ranges[piece.file].append((piece.start, piece.start + piece.num_bytes))
    for path, file in files.items():
        reached = file.header_bytes
        for start, end in sorted(ranges[path]):
            if start != reached:
                what = "overlap" if start < reached else "leave a gap"
                raise ValueError(f"slices in {shown(path)} {what} at byte {min(start, reached)}")
            reached = end
        if reached != file.num_bytes:
            raise ValueError(f"slices in {shown(path)} end at byte {reached} of {file.num_bytes}")


def _check_cover(tensors: Sequence[TensorEntry]) -> None:
    """Raise ValueError unless the slices of each tensor cover each of its elements once."""
    corners = 0
    for entry in tensors:
        if len(entry.slices) == 1:  # its size is right, and it lies within: it is all of the tensor
            continue
        dims = enumerate(entry.shape)
        cut = [dim for dim, n in dims if any(piece.shape[dim] != n for piece in entry.slices)]
        boxes = [
            (tuple(piece.offset[dim] for dim in cut), tuple(piece.shape[dim] for dim in cut))
            for piece in entry.slices
        ]
        corners += len(boxes) << len(cut)
        if corners > _MAX_CORNERS:
            raise ValueError(f"{entry.label}: it is cut into more parts than a plan would")
        if not covers_once(tuple(entry.shape[dim] for dim in cut), boxes):
            raise ValueError(f"{entry.label}: its slices overlap and leave holes")


def _problem(entry: TensorEntry) -> str | None:
    """What is impossible about a tensor, if anything."""
    if entry.kind not in (MODEL, OPTIMIZER):
        return f"unknown kind {shown(entry.kind)}"
    if entry.dtype not in NUMPY_OF_DTYPE:
        return f"unknown element type {shown(entry.dtype)}"
    dim = entry.vocab_dim
    if dim is not None and not (_is_count(dim) and dim < len(entry.shape)):
        return f"it has no dimension {shown(dim)} (vocab_dim)"
    item = NUMPY_OF_DTYPE[entry.dtype].itemsize
    for piece in entry.slices:
        if not len(piece.offset) == len(piece.shape) == len(entry.shape):
            return "a slice has another number of dimensions than the tensor"
        extents = zip(piece.offset, piece.shape, entry.shape, strict=True)
        if any(start + length > size for start, length, size in extents):
            return "a slice reaches beyond the tensor"
        if piece.num_bytes != piece.size * item or len(piece.crc32) != -(-piece.num_bytes // CHUNK_BYTES):
            return "sizes contradict each other"
    if not entry.slices:
        return "it has no slices"
    if sum(piece.size for piece in entry.slices) != prod(entry.shape):
        return "its slices do not make up the whole tensor"
    return None


def _slice(piece: Any, where: str) -> SliceEntry:
    where = f"a slice of {where}"
    _check_keys(piece, SliceEntry.__dataclass_fields__, where)
    checksums = piece["crc32"]
    if not isinstance(checksums, list) or not all(map(_is_crc, checksums)):
        raise ValueError(f"{where} has no proper checksums")
    if not (isinstance(piece["file"], str) and _is_count(piece["start"]) and _is_count(piece["num_bytes"])):
        raise ValueError(f"{where} has no proper file, start and num_bytes")
    if piece["flat"] is not None:
        raise ValueError(
            f"{where} has the flat interval {shown(piece['flat'])}; no plan cuts a tensor like that"
        )
    return SliceEntry(
        **{
            **piece,
            "offset": _index(piece["offset"], where),
            "shape": _index(piece["shape"], where),
            "crc32": tuple(checksums),
        }
    )


def _check_keys(entry: Any, keys: Any, where: str) -> None:
    if not isinstance(entry, dict) or entry.keys() != set(keys):
        raise ValueError(f"{where} has not exactly the keys {', '.join(keys)}")


def _index(numbers: Any, where: str) -> Index:
    if not isinstance(numbers, list) or len(numbers) > _MAX_DIMS or not all(map(_is_count, numbers)):
        raise ValueError(f"{where} has {shown(numbers)} for a place or shape")
    return tuple(numbers)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_crc(value: Any) -> bool:
    return isinstance(value, str) and _CRC32.fullmatch(value) is not None
