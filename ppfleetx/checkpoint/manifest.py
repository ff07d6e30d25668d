"""The manifest, which lists the contents of a checkpoint, and sealed files, which are small text files that
end with their own CRC-32. `docs/checkpoint_format.md` specifies both."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from ppfleetx.checkpoint.slices import NUMPY_OF_DTYPE, covers_once
from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.utils.input_files import parse_json, read_bounded

CHUNK_BYTES = 4 * 1024 * 1024
MAX_HEADER_BYTES = 8 + 100_000_000  # largest header of a safetensors file, including its length field
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
    """The manifest's entry for one slice of a tensor.

    Attributes:
        offset, shape: which part of the whole tensor the slice is, in elements.
        file: the safetensors file, relative to the checkpoint.
        start: where the slice begins in the file, in bytes.
        crc32: one checksum for each `CHUNK_BYTES` bytes.
        flat: unused, always null.
    """

    __pydantic_config__ = _EXACTLY

    offset: Shape
    shape: Shape
    file: str
    start: Count
    num_bytes: Count
    crc32: tuple[Crc32, ...]
    flat: None = None  # kept because the format has this key

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class DocumentEntry:
    """The manifest's entry for ``config.yaml`` or a file of the tokenizer."""

    __pydantic_config__ = _EXACTLY

    num_bytes: Annotated[Count, Field(le=MAX_DOCUMENT_BYTES)]
    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class TensorEntry:
    """The manifest's entry for a tensor.

    Attributes:
        name: the parameter's name in the whole model, the same under every plan.
        kind: ``model`` or ``optimizer``.
        state: name of the optimizer state (`moment1`, ...); empty for model parameters.
        dtype: element type, a key of NUMPY_OF_DTYPE.
        shape: the shape of the whole tensor.
        slices: the entries of its slices.
        vocab_dim: the dimension that counts vocabulary entries; None if there is none.
    """

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
        return self.kind, self.name, self.state

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name} {self.state}".rstrip()

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * NUMPY_OF_DTYPE[self.dtype].itemsize


@dataclass(frozen=True)
class FileEntry:
    """The manifest's entry for a safetensors file.

    Attributes:
        num_bytes: the size of the file.
        header_bytes: the size of the header, including the 8 bytes at the start of the file that give its
            length.
        header_crc32: the checksum of these ``header_bytes`` bytes.
    """

    __pydantic_config__ = _EXACTLY

    num_bytes: Count
    header_bytes: Annotated[Count, Field(le=MAX_HEADER_BYTES)]
    header_crc32: Crc32


def _problem(entry: TensorEntry, files: Mapping[str, FileEntry]) -> str | None:
    if entry.vocab_dim is not None and entry.vocab_dim >= len(entry.shape):
        return f"it has no dimension {entry.vocab_dim} (vocab_dim)"
    item = NUMPY_OF_DTYPE[entry.dtype].itemsize
    for piece in entry.slices:
        if piece.file not in files:
            return f"it is in {shown(piece.file)}, which is not listed"
        if not len(piece.offset) == len(piece.shape) == len(entry.shape):
            return "a slice has another number of dimensions than the tensor"
        extents = zip(piece.offset, piece.shape, entry.shape, strict=True)
        if any(start + length > size for start, length, size in extents):
            return "a slice reaches beyond the tensor"
        if piece.num_bytes != piece.size * item or len(piece.crc32) != -(-piece.num_bytes // CHUNK_BYTES):
            return "sizes contradict each other"
    cut = [dim for dim, n in enumerate(entry.shape) if any(piece.shape[dim] != n for piece in entry.slices)]
    boxes = [
        (tuple(piece.offset[dim] for dim in cut), tuple(piece.shape[dim] for dim in cut))
        for piece in entry.slices
    ]
    if not entry.slices or not covers_once(tuple(entry.shape[dim] for dim in cut), boxes):
        return "its slices do not cover it exactly once"
    return None


FORMAT, VERSION = "ppfleetx-checkpoint", 1
MANIFEST_FILE, MARKER_FILE, LATEST_FILE = "manifest.json", "COMPLETE", "latest"
BEST_FILE = "best"
_MAX_SEALED_BYTES = 4096
_RANK_DIR = re.compile(r"mp_\d{2,}_sharding_\d{2,}_pp_\d{2,}(_dp_\d{2,})?(_sep_\d{2,})?")
_STEP_DIR = re.compile(r"epoch_(\d+)_step_(\d+)")


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``, which lists everything in a checkpoint.

    Attributes:
        step: number of finished optimizer steps.
        epoch: number of finished passes over the data.
        files: entries of the safetensors files, by path relative to the checkpoint. The separator is `/`.
        tensors: entries of the tensors, by (``model`` or ``optimizer``, parameter name, optimizer state
            name).
        state: the trainer's state (progress, RNG, scaler, schedule, ...): any JSON value.
        plan: the parallel plan that saved the checkpoint.
        ranks: for each rank, its directory and its coordinates in the plan.
        vocab_size: vocabulary size without padding.
        config: the configuration of the run that saved the checkpoint.
        fingerprints: hashes that identify tokenizer and data.
        run: id of the training run that saved the checkpoint; None if unknown.
        documents: entries of ``config.yaml`` and the tokenizer files, by path.
    """

    __pydantic_config__ = _EXACTLY

    step: Count
    epoch: Count
    files: Mapping[RelativePath, FileEntry]
    tensors: Mapping[tuple[str, str, str], TensorEntry]
    state: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[Mapping[str, Any], ...] = ()
    vocab_size: Count | None = None
    config: Mapping[str, Any] | str | None = None
    fingerprints: Mapping[str, Any] = field(default_factory=dict)
    run: str | None = None
    documents: Annotated[Mapping[DocumentPath, DocumentEntry], Field(max_length=MAX_DOCUMENTS)] = field(
        default_factory=dict
    )

    def to_bytes(self) -> bytes:
        """Return the content of ``manifest.json``. Raises CheckpointError if ``state`` is not JSON."""
        document = {"format": FORMAT, "version": VERSION, "chunk_bytes": CHUNK_BYTES, **asdict(self)}
        document["tensors"] = [asdict(entry) for entry in self.tensors.values()]
        if not self.documents:  # older versions of ppfleetx reject unknown keys
            del document["documents"]
        try:
            text = json.dumps(document, indent=1, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the state to be saved cannot be written as JSON: {error}") from error
        return text.encode()

    @staticmethod
    def from_bytes(content: bytes, where: str) -> Manifest:
        """Parse and check the content of a ``manifest.json``. Raises CheckpointError if it is invalid or of
        an unsupported version.

        Args:
            where: the path of the file, for messages.
        """
        document = parse_json(content, where)
        if document.pop("format", None) != FORMAT:
            raise CheckpointError(f"{where} is not the manifest of a ppfleetx checkpoint")
        version = document.pop("version", None)
        if version != VERSION:
            raise CheckpointError(
                f"{where} has format version {shown(version)}; this program reads version {VERSION}"
            )
        if document.pop("chunk_bytes", None) != CHUNK_BYTES:
            raise CheckpointError(f"{where}: checksums over chunks of another size than {CHUNK_BYTES}")
        try:
            listed = document.pop("tensors")
            tensors = {(entry["kind"], entry["name"], entry["state"]): entry for entry in listed}
            if len(tensors) != len(listed):
                raise ValueError("a tensor is listed twice")
            manifest = _manifests.validate_python({**document, "tensors": tensors})
            for entry in manifest.tensors.values():
                if problem := _problem(entry, manifest.files):
                    raise ValueError(f"tensor {shown(entry.label)}: {problem}")
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise CheckpointError(
                f"{where}: {key} = {shown(first['input'])}: {first['msg'].removeprefix('Value error, ')}"
            ) from error
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{where}: tensors is not a list of entries with kind, name and state ({error})"
            ) from error
        except ValueError as error:
            raise CheckpointError(f"{where}: {error}") from error
        return manifest


_manifests = TypeAdapter(Manifest)


def rank_directory(mp: int = 0, sharding: int = 0, pp: int = 0, dp: int = 0, sep: int = 0) -> str:
    """Return the name of a rank's directory in a checkpoint, such as ``mp_01_sharding_00_pp_00``. ``dp`` and
    ``sep`` are in the name only if they are above 0."""
    # Ranks with dp or sep above 0 write only weights of experts.
    replica = "".join(f"_{axis}_{at:02d}" for axis, at in (("dp", dp), ("sep", sep)) if at)
    return f"mp_{mp:02d}_sharding_{sharding:02d}_pp_{pp:02d}{replica}"


def is_rank_directory(name: str) -> bool:
    return _RANK_DIR.fullmatch(name) is not None


def step_directory(epoch: int, step: int) -> str:
    return f"epoch_{epoch}_step_{step}"


def parse_step_directory(name: str) -> tuple[int, int] | None:
    """Return the (epoch, step) in the name of a step directory; None for any other name."""
    match = _STEP_DIR.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def read_sealed(path: Path) -> dict[str, str] | None:
    """Read a text file that ends with its own CRC-32, and return its fields. Returns None if the checksum is
    wrong. Raises CheckpointError if the file cannot be read."""
    return unseal(read_bounded(path, _MAX_SEALED_BYTES))


def seal(**fields: str | int) -> bytes:
    """Return the content of a sealed file: one line ``key value`` for each field, and a last line with the
    CRC-32 of all lines before it."""
    body = "".join(f"{key} {value}\n" for key, value in fields.items()).encode()
    return body + f"crc32 {zlib.crc32(body):08x}\n".encode()


def unseal(content: bytes) -> dict[str, str] | None:
    body, _, _ = content.rpartition(b"crc32 ")
    try:
        lines = body.decode("ascii").splitlines()
        fields = dict(line.split(" ", 1) for line in lines)
    except (UnicodeDecodeError, ValueError):
        return None
    return fields if fields and seal(**fields) == content else None


def marker_of(manifest: bytes, saved_at_ns: int) -> bytes:
    digest = hashlib.sha256(manifest).hexdigest()
    return seal(
        format=f"{FORMAT}-{VERSION}",
        manifest_sha256=digest,
        manifest_bytes=len(manifest),
        saved_at_ns=saved_at_ns,
    )
