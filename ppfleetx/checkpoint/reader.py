"""Read tensors from a checkpoint, whole or in part, however they are sliced."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint import storage
from ppfleetx.checkpoint.manifest import (
    FORMAT,
    MANIFEST_FILE,
    MARKER_FILE,
    VERSION,
    Manifest,
    SliceEntry,
    TensorEntry,
    read_sealed,
)
from ppfleetx.checkpoint.slices import MODEL, NUMPY_OF_DTYPE, Index, intersect
from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.utils.input_files import read_bounded

# Rows are read in blocks of about this size, so that reading a narrow column does not need memory for the
# whole matrix.
_BLOCK_BYTES = 64 * 1024 * 1024


class Checkpoint:
    """A checkpoint that :func:`open_checkpoint` opened for reading. Everything except the tensor data has
    been checked. `read` checks the data that it returns, and `verify` checks all data."""

    def __init__(self, path: Path, manifest: Manifest, saved_at_ns: int) -> None:
        self.path, self.manifest, self.saved_at_ns = path, manifest, saved_at_ns

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def state(self) -> Mapping[str, Any]:
        return self.manifest.state

    def names(self, kind: str = MODEL) -> list[str]:
        """Return the names of all model or optimizer tensors, each once, in the order of saving.

        Args:
            kind: ``model`` or ``optimizer``.
        """
        return list(dict.fromkeys(name for name, _ in self.keys(kind)))

    def keys(self, kind: str = MODEL) -> list[tuple[str, str]]:
        """Return (parameter name, state name) of all model or optimizer tensors, in the order of saving.
        State names are empty for model tensors.

        Args:
            kind: ``model`` or ``optimizer``.
        """
        return [(entry.name, entry.state) for entry in self.manifest.tensors.values() if entry.kind == kind]

    def entry(self, name: str, kind: str = MODEL, state: str = "") -> TensorEntry:
        """Return the manifest's entry for a tensor. Raises CheckpointError if there is no such tensor."""
        try:
            return self.manifest.tensors[kind, name, state]
        except KeyError:
            what = f"state {state} of {name}" if state else name
            raise CheckpointError(f"checkpoint {self.path} holds no {kind} tensor {what}") from None

    def read(
        self,
        name: str,
        kind: str = MODEL,
        state: str = "",
        *,
        offset: Index | None = None,
        shape: Index | None = None,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Read a tensor, or the part of it at ``offset`` with ``shape``. bfloat16 is read as bits in uint16.
        ``out`` is a contiguous array to fill and return. Raises CheckpointError if the tensor or part does
        not exist or is damaged."""
        entry = self.entry(name, kind, state)
        offset = (0,) * len(entry.shape) if offset is None else offset
        shape = entry.shape if shape is None else shape
        result = np.empty(shape, NUMPY_OF_DTYPE[entry.dtype]) if out is None else out
        assert (result.shape, result.dtype) == (shape, NUMPY_OF_DTYPE[entry.dtype]), "out does not fit"
        self._fill(entry, offset, result)
        return result

    def document(self, relative: str) -> bytes | None:
        """Return the content of ``config.yaml`` or a tokenizer file; None if the checkpoint does not have
        this file. Raises CheckpointError if the file is damaged."""
        entry = self.manifest.documents.get(relative)
        return None if entry is None else storage.read_document(self.path, relative, entry)

    def verify(self) -> None:
        """Check all tensor data. Raises CheckpointError with a message that lists all damaged slices."""
        damage = list(self.damage())
        if damage:
            raise CheckpointError("\n".join(damage))

    def damage(self) -> Iterator[str]:
        """Read all tensor data, and yield one sentence for each damaged slice."""
        yield from damage_of(self.path, self.manifest.tensors.values())

    def _fill(self, entry: TensorEntry, offset: Index, result: np.ndarray) -> None:
        piece = entry.slices[0]
        if (piece.offset, piece.shape) == (offset, result.shape):
            content = memoryview(result.reshape(-1).view(np.uint8))
            storage.read_range(self.path, piece, 0, piece.num_bytes, into=content)
            return
        found = 0
        for piece in entry.slices:
            common = intersect((offset, result.shape), (piece.offset, piece.shape))
            if common is not None:
                found += prod(common[1])
                self._copy(piece, common, result, offset)
        if found != result.size:
            raise CheckpointError(
                f"{entry.name} has shape {list(entry.shape)} in checkpoint {self.path}: no part of shape "
                f"{list(result.shape)} is at {list(offset)}"
            )

    def _copy(
        self,
        piece: SliceEntry,
        common: tuple[Index, Index],
        result: np.ndarray,
        result_offset: Index,
    ) -> None:
        offset, shape = common
        held = result.dtype
        if not shape:
            result[...] = np.frombuffer(storage.read_range(self.path, piece, 0, held.itemsize), held)[0]
            return
        row_size = prod(piece.shape[1:])
        row_bytes = row_size * held.itemsize
        rows_at_once = max(1, _BLOCK_BYTES // max(row_bytes, 1))
        inner, inner_target = (
            tuple(slice(o - b, o - b + n) for o, b, n in zip(offset, base, shape, strict=True))[1:]
            for base in (piece.offset, result_offset)
        )
        for row in range(offset[0], offset[0] + shape[0], rows_at_once):
            count = min(rows_at_once, offset[0] + shape[0] - row)
            start = (row - piece.offset[0]) * row_bytes
            content = storage.read_range(self.path, piece, start, start + count * row_bytes)
            block = np.frombuffer(content, held).reshape(count, *piece.shape[1:])
            target_row = row - result_offset[0]
            result[(slice(target_row, target_row + count), *inner_target)] = block[(slice(None), *inner)]


def damage_of(directory: Path, tensors: Iterable[TensorEntry]) -> Iterator[str]:
    """Check the data of tensors in a checkpoint directory, and yield one sentence for each damaged slice."""
    return storage.damage(directory, ((entry.label, piece) for entry in tensors for piece in entry.slices))


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the checkpoint in a step directory. Everything but tensor data is checked. Raises CheckpointError
    if the checkpoint is incomplete or damaged."""
    path = Path(path)
    marker = read_marker(path)
    content = read_manifest(path, marker)
    manifest = Manifest.from_bytes(content, str(path / MANIFEST_FILE))
    for relative, entry in manifest.files.items():
        storage.check_file(path, relative, entry)
    for relative, entry in manifest.documents.items():
        storage.read_document(path, relative, entry)
    return Checkpoint(path, manifest, int(marker["saved_at_ns"]))


def read_manifest(path: Path, marker: Mapping[str, str]) -> bytes:
    """Return the bytes of ``manifest.json`` in the step directory ``path``. Raises CheckpointError if its
    size or checksum is wrong.

    Args:
        marker: the fields of ``COMPLETE``, with the correct size and checksum.
    """
    manifest_path, size = path / MANIFEST_FILE, int(marker["manifest_bytes"])
    content = read_bounded(manifest_path, size)
    if len(content) != size:
        raise CheckpointError(f"{manifest_path} has {len(content)} bytes instead of {size}: it is damaged")
    if hashlib.sha256(content).hexdigest() != marker["manifest_sha256"]:
        raise CheckpointError(f"{manifest_path} is damaged: its checksum differs from that in {MARKER_FILE}")
    return content


def read_marker(path: Path) -> dict[str, str]:
    """Return the fields of the file ``COMPLETE``, which marks the step directory ``path`` as a complete
    checkpoint. Raises CheckpointError if the file is missing, damaged or of another format version."""
    marker_path = path / MARKER_FILE
    if not marker_path.exists():
        raise CheckpointError(f"checkpoint {path} is not complete: it has no file {MARKER_FILE}")
    fields = read_sealed(marker_path)
    if fields is None:
        raise CheckpointError(f"{marker_path} is damaged: its checksum is wrong")
    if fields.get("format") != f"{FORMAT}-{VERSION}":
        raise CheckpointError(
            f"{marker_path} is of format {shown(fields.get('format'))}, not {FORMAT}-{VERSION}"
        )
    return fields
