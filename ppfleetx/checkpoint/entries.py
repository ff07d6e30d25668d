"""What a manifest says of files, tensors and slices, and the checks that it makes sense.

pydantic checks the types when a manifest is read, :func:`check_together` what types cannot say: each element
of each tensor is in exactly one slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from ppfleetx.checkpoint.slices import NUMPY_OF_DTYPE, covers_once
from ppfleetx.config.errors import shown

CHUNK_BYTES = 4 * 1024 * 1024
MAX_HEADER_BYTES = 8 + 100_000_000  # of a safetensors file, with its length
MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
MAX_DOCUMENTS = 64
_EXACTLY = ConfigDict(extra="forbid")


def _within_checkpoint(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or parts[0] == "/" or ".." in parts or "\0" in path:
        raise ValueError("it is not inside the checkpoint")
    return path


def _is_known_dtype(dtype: str) -> str:
    if dtype not in NUMPY_OF_DTYPE:
        raise ValueError(f"unknown element type; those that are known: {', '.join(NUMPY_OF_DTYPE)}")
    return dtype


Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
Shape = Annotated[tuple[Count, ...], Field(max_length=32)]  # NumPy's limit
Crc32 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{8}$")]
RelativePath = Annotated[str, AfterValidator(_within_checkpoint)]
DocumentPath = Annotated[
    str,
    StringConstraints(
        pattern=r"^([A-Za-z0-9_-][A-Za-z0-9._-]*/)?[A-Za-z0-9_-][A-Za-z0-9._-]*$", max_length=255
    ),
]


@dataclass(frozen=True)
class SliceEntry:
    """Where one piece of a tensor lies.

    `start` is the position of its first byte in `file`; `crc32` has one checksum for each
    `CHUNK_BYTES` of its bytes (the last chunk may be shorter). Nothing uses `flat`, a key of the format.
    """

    __pydantic_config__ = _EXACTLY

    offset: Shape
    shape: Shape
    file: str
    start: Count
    num_bytes: Count
    crc32: tuple[Crc32, ...]
    flat: None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class DocumentEntry:
    """A small file that describes the model: `config.yaml`, or one of the tokenizer's."""

    __pydantic_config__ = _EXACTLY

    num_bytes: Annotated[Count, Field(le=MAX_DOCUMENT_BYTES)]
    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the model or of the optimizer, and its pieces. `vocab_dim` as in TensorSlice."""

    __pydantic_config__ = _EXACTLY

    name: str
    kind: Literal["model", "optimizer"]
    state: str
    dtype: Annotated[str, AfterValidator(_is_known_dtype)]
    shape: Shape
    slices: tuple[SliceEntry, ...]
    vocab_dim: Count | None = None

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

    __pydantic_config__ = _EXACTLY

    num_bytes: Count
    header_bytes: Annotated[Count, Field(le=MAX_HEADER_BYTES)]
    header_crc32: Crc32


def check_together(files: Mapping[str, FileEntry], tensors: Sequence[TensorEntry]) -> None:
    """Raise ValueError unless each element of each tensor is in exactly one slice of a listed file."""
    if len({entry.key for entry in tensors}) != len(tensors):
        raise ValueError("a tensor is listed twice")
    for entry in tensors:
        if problem := _problem(entry, files):
            raise ValueError(f"tensor {shown(entry.label)}: {problem}")


def _problem(entry: TensorEntry, files: Mapping[str, FileEntry]) -> str | None:
    """What is impossible about a tensor, if anything."""
    if entry.vocab_dim is not None and entry.vocab_dim >= len(entry.shape):
        return f"it has no dimension {entry.vocab_dim} (vocab_dim)"
    item = NUMPY_OF_DTYPE[entry.dtype].itemsize
    for piece in entry.slices:
        if piece.file not in files:
            return f"it lies in {shown(piece.file)}, which is not listed"
        if not len(piece.offset) == len(piece.shape) == len(entry.shape):
            return "a slice has another number of dimensions than the tensor"
        extents = zip(piece.offset, piece.shape, entry.shape, strict=True)
        if any(start + length > size for start, length, size in extents):
            return "a slice reaches beyond the tensor"
        if piece.num_bytes != piece.size * item or len(piece.crc32) != -(-piece.num_bytes // CHUNK_BYTES):
            return "sizes contradict each other"
    if sum(piece.size for piece in entry.slices) != prod(entry.shape):
        return "its slices do not make up the whole tensor"
    cut = [dim for dim, n in enumerate(entry.shape) if any(piece.shape[dim] != n for piece in entry.slices)]
    boxes = [
        (tuple(piece.offset[dim] for dim in cut), tuple(piece.shape[dim] for dim in cut))
        for piece in entry.slices
    ]
    if not entry.slices or not covers_once(tuple(entry.shape[dim] for dim in cut), boxes):
        return "its slices overlap and leave holes"
    return None
