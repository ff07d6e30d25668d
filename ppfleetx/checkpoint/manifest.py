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
from pathlib import Path
from typing import Any

from ppfleetx.checkpoint.entries import (
    CHUNK_BYTES,
    DocumentEntry,
    FileEntry,
    TensorEntry,
    check_together,
    read_documents,
    read_files,
    read_tensors,
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
        documents: what makes the checkpoint speak for itself (`checkpoint/documents.py`), by path; older
            versions saved none.
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
        """The file's content. Raises CheckpointError when the state is not JSON."""
        document = {"format": FORMAT, "version": VERSION, "chunk_bytes": CHUNK_BYTES, **asdict(self)}
        document["tensors"] = [asdict(entry) for entry in self.tensors.values()]
        if not self.documents:  # as older versions wrote it, which refuse keys they do not know
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
            CheckpointError: it is of another format or version, or says what cannot be.
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
            return cls(**_checked(document))
        except ValueError as error:
            raise CheckpointError(f"{where}: {error}") from error


def rank_directory(mp: int = 0, sharding: int = 0, pp: int = 0, dp: int = 0, sep: int = 0) -> str:
    """Directory of a rank's files within a checkpoint. Of replicas along dp and sep all but the first write
    what lies in the experts' view alone."""
    replica = "".join(f"_{axis}_{at:02d}" for axis, at in (("dp", dp), ("sep", sep)) if at)
    return f"mp_{mp:02d}_sharding_{sharding:02d}_pp_{pp:02d}{replica}"


def is_rank_directory(name: str) -> bool:
    """Whether ``name`` is that of a rank's directory (:func:`rank_directory`)."""
    return _RANK_DIR.fullmatch(name) is not None


def step_directory(epoch: int, step: int) -> str:
    """Directory of a checkpoint within the output directory."""
    return f"epoch_{epoch}_step_{step}"


def parse_step_directory(name: str) -> tuple[int, int] | None:
    """(epoch, step), or None when `name` is not that of a checkpoint."""
    match = _STEP_DIR.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def read_sealed(path: Path) -> dict[str, str] | None:
    """Fields of a sealed file, or None when it was torn or altered. Raises CheckpointError for no file."""
    return unseal(read_bounded(path, _MAX_SEALED_BYTES))


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


_OBJECT, _OPTIONAL_OBJECT = (dict,), (dict, type(None))
# Types of what a manifest says beside files and tensors, and of what this program itself keeps in `state`.
_TYPES: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "epoch": (int,),
    "state": _OBJECT,
    "plan": _OBJECT,
    "ranks": (list,),
    "vocab_size": (int, type(None)),
    "config": (dict, str, type(None)),
    "fingerprints": _OBJECT,
    "run": (str, type(None)),
}
_STATE_TYPES = dict.fromkeys(
    ("train", "progress", "schedule", "scaler", "source", "rng", "rng_of_ranks"), _OPTIONAL_OBJECT
)


def _checked(document: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `Manifest` from the parsed file. Raises ValueError naming what is wrong."""
    if absent := {"step", "epoch", "files", "tensors"} - document.keys():
        raise ValueError(f"it lacks {', '.join(sorted(absent))}")
    if unknown := sorted(document.keys() - Manifest.__dataclass_fields__):
        raise ValueError(f"it has the unknown key {shown(unknown[0])}")
    _check_types(document, _TYPES, "")
    _check_types(document.get("state", {}), _STATE_TYPES, "state.")
    config = document.get("config")
    if isinstance(config, dict):
        _check_types(config, {"Model": _OPTIONAL_OBJECT}, "config.")
        _check_types(config.get("Model") or {}, {"lora": _OPTIONAL_OBJECT}, "config.Model.")
    ranks = document.get("ranks", [])
    for rank in ranks:
        if not isinstance(rank, dict) or not isinstance(rank.get("directory"), str | None):
            raise ValueError("one of ranks is no object with a directory")
    files, tensors = read_files(document["files"]), read_tensors(document["tensors"])
    check_together(files, tensors)
    keyed = {entry.key: entry for entry in tensors}
    documents = read_documents(document.get("documents", {}))
    return {**document, "files": files, "tensors": keyed, "ranks": tuple(ranks), "documents": documents}


def _check_types(values: dict[str, Any], types: Mapping[str, tuple[type, ...]], prefix: str) -> None:
    for key, allowed in types.items():
        if key in values:
            value = values[key]
            is_count = type(value) is not int or 0 <= value < 1 << 63
            if type(value) not in allowed or not is_count:
                raise ValueError(f"{prefix}{key} is {shown(value)}, which it cannot be")
