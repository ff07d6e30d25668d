"""The manifest: what a checkpoint holds and where, and the small sealed files beside it.

`docs/checkpoint_format.md` describes the same for people who write another reader.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import PurePosixPath
from typing import Any

from ppfleetx.checkpoint.slices import MODEL, NUMPY_OF_DTYPE, OPTIMIZER, Index
from ppfleetx.config.errors import CheckpointError

FORMAT, VERSION = "ppfleetx-checkpoint", 1
MANIFEST_FILE, MARKER_FILE, LATEST_FILE = "manifest.json", "COMPLETE", "latest"
BEST_FILE = "best"
CHUNK_BYTES = 4 * 1024 * 1024
_RANK_DIR = re.compile(r"mp_\d{2,}_sharding_\d{2,}_pp_\d{2,}")
_STEP_DIR = re.compile(r"epoch_(\d+)_step_(\d+)")


@dataclass(frozen=True)
class SliceEntry:
    """Where one piece of a tensor lies.

    `start` is the position of its first byte in `file`; `crc32` has one checksum for each
    `CHUNK_BYTES` of its bytes (the last chunk may be shorter).
    """

    offset: Index
    shape: Index
    file: str
    start: int
    num_bytes: int
    crc32: tuple[str, ...]
    flat: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        return self.flat[1] - self.flat[0] if self.flat else prod(self.shape)


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
        return self.kind, self.name, self.state

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.kind} {self.name} {self.state}".rstrip()

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * NUMPY_OF_DTYPE[self.dtype].itemsize


@dataclass(frozen=True)
class FileEntry:
    """A safetensors file: its size, and size and CRC-32 of its header (length field included)."""

    num_bytes: int
    header_bytes: int
    header_crc32: str


@dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json.

    Attributes:
        step, epoch: optimizer steps and passes over the data that are done.
        files: by path relative to the checkpoint, with `/`.
        tensors: by (kind, name, state).
        state: the trainer's own state (progress, RNG, scaler, schedule, ...), any JSON.
        plan: parallel degrees it was saved under.
        ranks: for each rank its directory and its coordinate in the plan.
        vocab_size: true vocabulary size, for tensors with a `vocab_dim`.
        config: the resolved configuration.
        fingerprints: identity of tokenizer and data.
    """

    step: int
    epoch: int
    files: Mapping[str, FileEntry]
    tensors: Mapping[tuple[str, str, str], TensorEntry]
    state: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[Mapping[str, Any], ...] = ()
    vocab_size: int | None = None
    config: Mapping[str, Any] | str | None = None
    fingerprints: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The file's content. Raises CheckpointError when the state is not JSON."""
        document = {"format": FORMAT, "version": VERSION, "chunk_bytes": CHUNK_BYTES, **asdict(self)}
        document["tensors"] = [asdict(entry) for entry in self.tensors.values()]
        try:
            text = json.dumps(document, indent=1, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the state to be saved cannot be written as JSON: {error}") from error
        return text.encode()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Manifest:
        """Parse and check. Raises CheckpointError naming `where`."""
        try:
            document = json.loads(content)
            if document.pop("format") != FORMAT:
                raise CheckpointError(f"{where} is not the manifest of a ppfleetx checkpoint")
            version = document.pop("version")
            if version != VERSION:
                raise CheckpointError(
                    f"{where} has format version {version}; this program reads version {VERSION}"
                )
            if document.pop("chunk_bytes") != CHUNK_BYTES:
                raise CheckpointError(f"{where}: checksums over chunks of another size than {CHUNK_BYTES}")
            return _checked(cls(**_typed(document)), where)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{where} cannot be understood: {type(error).__name__} {error}") from error


def rank_directory(mp: int = 0, sharding: int = 0, pp: int = 0) -> str:
    """Directory of a rank's files within a checkpoint."""
    return f"mp_{mp:02d}_sharding_{sharding:02d}_pp_{pp:02d}"


def is_rank_directory(name: str) -> bool:
    return _RANK_DIR.fullmatch(name) is not None


def step_directory(epoch: int, step: int) -> str:
    """Directory of a checkpoint within the output directory."""
    return f"epoch_{epoch}_step_{step}"


def parse_step_directory(name: str) -> tuple[int, int] | None:
    """(epoch, step), or None when `name` is not that of a checkpoint."""
    match = _STEP_DIR.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def seal(**fields: str | int) -> bytes:
    """Content of a small file of `key value` lines whose last line is the CRC-32 of what precedes it."""
    body = "".join(f"{key} {value}\n" for key, value in fields.items()).encode()
    return body + f"crc32 {zlib.crc32(body):08x}\n".encode()


def unseal(content: bytes) -> dict[str, str] | None:
    """Fields of a sealed file, or None when it was torn or altered."""
    body, _, _ = content.rpartition(b"crc32 ")
    try:
        lines = body.decode("ascii").splitlines()
        fields = dict(line.split(" ", 1) for line in lines)
    except (UnicodeDecodeError, ValueError):
        return None
    return fields if fields and seal(**fields) == content else None


def marker_of(manifest: bytes, saved_at_ns: int) -> bytes:
    """Content of the completeness marker that belongs to a manifest."""
    digest = hashlib.sha256(manifest).hexdigest()
    return seal(
        format=f"{FORMAT}-{VERSION}",
        manifest_sha256=digest,
        manifest_bytes=len(manifest),
        saved_at_ns=saved_at_ns,
    )


def _typed(document: dict[str, Any]) -> dict[str, Any]:
    tensors = [_tensor_entry(entry) for entry in document["tensors"]]
    keyed = {entry.key: entry for entry in tensors}
    if len(keyed) != len(tensors):
        raise ValueError("a tensor is listed twice")
    files = {path: FileEntry(**entry) for path, entry in document["files"].items()}
    return {**document, "files": files, "tensors": keyed, "ranks": tuple(document["ranks"])}


def _tensor_entry(entry: dict[str, Any]) -> TensorEntry:
    slices = tuple(
        SliceEntry(
            **{
                **piece,
                "offset": tuple(piece["offset"]),
                "shape": tuple(piece["shape"]),
                "crc32": tuple(piece["crc32"]),
                "flat": None if piece["flat"] is None else tuple(piece["flat"]),
            }
        )
        for piece in entry["slices"]
    )
    return TensorEntry(**{**entry, "shape": tuple(entry["shape"]), "slices": slices})


def _checked(manifest: Manifest, where: str) -> Manifest:
    for path in manifest.files:
        parts = PurePosixPath(path).parts
        if not parts or PurePosixPath(path).is_absolute() or ".." in parts:
            raise CheckpointError(f"{where} names the file {path!r}, which is not inside the checkpoint")
    for entry in manifest.tensors.values():
        problem = _problem(entry, manifest.files)
        if problem:
            raise CheckpointError(f"{where}, {entry.kind} {entry.name} {entry.state}: {problem}")
    return manifest


def _problem(entry: TensorEntry, files: Mapping[str, FileEntry]) -> str | None:
    """What is impossible about a tensor's entry, if anything."""
    if entry.kind not in (MODEL, OPTIMIZER):
        return f"unknown kind {entry.kind!r}"
    if entry.dtype not in NUMPY_OF_DTYPE:
        return f"unknown element type {entry.dtype!r}"
    item = NUMPY_OF_DTYPE[entry.dtype].itemsize
    for piece in entry.slices:
        if piece.file not in files:
            return f"lies in {piece.file}, which is not listed"
        if piece.num_bytes != piece.size * item or len(piece.crc32) != -(-piece.num_bytes // CHUNK_BYTES):
            return "sizes contradict each other"
        if not len(piece.offset) == len(piece.shape) == len(entry.shape):
            return "a slice has another number of dimensions than the tensor"
        extents = zip(piece.offset, piece.shape, entry.shape, strict=True)
        if any(start < 0 or start + length > size for start, length, size in extents):
            return "a slice reaches beyond the tensor"
        if piece.flat and not 0 <= piece.flat[0] < piece.flat[1] <= prod(piece.shape):
            return "a flat interval reaches beyond its box"
    if not entry.slices:
        return "it has no slices"
    if sum(piece.size for piece in entry.slices) != prod(entry.shape):
        return "its slices do not make up the whole tensor"
    return None
