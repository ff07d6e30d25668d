"""The manifest: what a checkpoint holds and where; and the small sealed files beside it.

`docs/checkpoint_format.md` specifies the format.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ppfleetx.checkpoint.entries import (
    CHUNK_BYTES,
    MAX_DOCUMENTS,
    Count,
    DocumentEntry,
    DocumentPath,
    FileEntry,
    RelativePath,
    TensorEntry,
    check_together,
)
from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.utils.foreign_files import parse_json, read_bounded

FORMAT, VERSION = "ppfleetx-checkpoint", 1
MANIFEST_FILE, MARKER_FILE, LATEST_FILE = "manifest.json", "COMPLETE", "latest"
BEST_FILE = "best"
_MAX_SEALED_BYTES = 4096
_RANK_DIR = re.compile(r"mp_\d{2,}_sharding_\d{2,}_pp_\d{2,}(_dp_\d{2,})?(_sep_\d{2,})?")
_STEP_DIR = re.compile(r"epoch_(\d+)_step_(\d+)")


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
        run: identity of the run that saved it; None: it belongs to no run (older versions, converted).
        documents: configuration and tokenizer (`checkpoint/documents.py`), by path; older versions saved
            none.
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
    run: str | None = None
    documents: Mapping[str, DocumentEntry] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The file's content. Raises CheckpointError if the state is not JSON."""
        document = {"format": FORMAT, "version": VERSION, "chunk_bytes": CHUNK_BYTES, **asdict(self)}
        document["tensors"] = [asdict(entry) for entry in self.tensors.values()]
        if not self.documents:  # older versions refuse keys that they do not know
            del document["documents"]
        try:
            text = json.dumps(document, indent=1, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the state to be saved cannot be written as JSON: {error}") from error
        return text.encode()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Manifest:
        """Parse and check.

        Args:
            content: the file's content.
            where: its name, for messages.

        Raises:
            CheckpointError: it has another format or version, or is inconsistent.
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
            read = _Document.model_validate(document)
            check_together(read.files, read.tensors)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise CheckpointError(
                f"{where}: {key} = {shown(first['input'])}: {first['msg'].removeprefix('Value error, ')}"
            ) from error
        except ValueError as error:
            raise CheckpointError(f"{where}: {error}") from error
        return cls(**{**dict(read), "tensors": {entry.key: entry for entry in read.tensors}})


class _Document(BaseModel):
    """The keys of manifest.json behind format, version and chunk_bytes; see :class:`Manifest`."""

    model_config = ConfigDict(extra="forbid")

    step: Count
    epoch: Count
    files: dict[RelativePath, FileEntry]
    tensors: list[TensorEntry]
    state: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    ranks: tuple[dict[str, Any], ...] = ()
    vocab_size: Count | None = None
    config: dict[str, Any] | str | None = None
    fingerprints: dict[str, Any] = {}
    run: str | None = None
    documents: dict[DocumentPath, DocumentEntry] = Field(default={}, max_length=MAX_DOCUMENTS)


def rank_directory(mp: int = 0, sharding: int = 0, pp: int = 0, dp: int = 0, sep: int = 0) -> str:
    """Directory of a rank's files within a checkpoint. Replicas along dp and sep after the first write only
    what is in the experts' view."""
    replica = "".join(f"_{axis}_{at:02d}" for axis, at in (("dp", dp), ("sep", sep)) if at)
    return f"mp_{mp:02d}_sharding_{sharding:02d}_pp_{pp:02d}{replica}"


def is_rank_directory(name: str) -> bool:
    """Whether ``name`` is that of a rank's directory (:func:`rank_directory`)."""
    return _RANK_DIR.fullmatch(name) is not None


def step_directory(epoch: int, step: int) -> str:
    """Directory of a checkpoint within the output directory."""
    return f"epoch_{epoch}_step_{step}"


def parse_step_directory(name: str) -> tuple[int, int] | None:
    """(epoch, step), or None if `name` is not that of a checkpoint."""
    match = _STEP_DIR.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def read_sealed(path: Path) -> dict[str, str] | None:
    """Fields of a sealed file; None if it is damaged. Raises CheckpointError if it cannot be read."""
    return unseal(read_bounded(path, _MAX_SEALED_BYTES))


def seal(**fields: str | int) -> bytes:
    """Content of a small file of `key value` lines whose last line is the CRC-32 of what precedes it."""
    body = "".join(f"{key} {value}\n" for key, value in fields.items()).encode()
    return body + f"crc32 {zlib.crc32(body):08x}\n".encode()


def unseal(content: bytes) -> dict[str, str] | None:
    """Fields of a sealed file's content; None if it is damaged."""
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
