"""Record and find out which training run saved a checkpoint. Each run has a random id. A run deletes and
replaces only its own checkpoints."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from ppfleetx.checkpoint import storage
from ppfleetx.checkpoint.manifest import (
    MANIFEST_FILE,
    MARKER_FILE,
    Manifest,
    read_sealed,
    seal,
    step_directory,
)
from ppfleetx.checkpoint.reader import Checkpoint, read_manifest, read_marker
from ppfleetx.config.errors import CheckpointError
from ppfleetx.utils.output_files import atomic_write

RUN_FILE = "run_id"


@dataclass(frozen=True)
class _Saved:
    run: str | None
    name: str
    files: frozenset[str]


# A cache, by hash of the manifest: every save needs these facts, and parsing a long manifest is slow.
_saved: dict[str, _Saved] = {}


@dataclass(frozen=True)
class Ownership:
    """The rule that decides which checkpoints in an output directory a training run may delete or replace.

    Attributes:
        run: the id of the run.
        keep_max: how many of its own checkpoints the run keeps, in addition to the best one; None: all.
        spared: step directories that the run was started from, with links resolved. They are kept.
    """

    run: str
    keep_max: int | None = None
    spared: frozenset[Path] = frozenset()

    def may_replace(self, path: Path) -> bool:
        """Return whether the run may delete or replace the checkpoint at ``path``. True if the run saved
        every file in the checkpoint, saved it under its current name, and was not started from it. Always
        False for a symbolic link."""
        if path.is_symlink() or path.resolve() in self.spared:
            return False
        try:
            saved = _saved_by(path)
        except CheckpointError:
            return False
        return (saved.run, saved.name) == (self.run, path.name) and _files_in(path) <= saved.files


@dataclass(frozen=True)
class RunRecord:
    """The content of the file ``run_id`` in an output directory.

    Attributes:
        run: the id of the run that saves in this directory.
        continues: if this run was started from another run's checkpoint in this directory, the name of that
            checkpoint; else None.
    """

    run: str
    continues: str | None = None

    def includes(self, checkpoint: Checkpoint) -> bool:
        """Return whether ``checkpoint`` is part of this run's history, so that the run may resume from it."""
        return checkpoint.manifest.run == self.run or checkpoint.path.name == self.continues


def new_run() -> str:
    return secrets.token_hex(16)


def read_run(output_dir: Path) -> RunRecord | None:
    """Read the file ``run_id`` of an output directory; None if it is missing or damaged."""
    path = output_dir / RUN_FILE
    fields = read_sealed(path) if path.is_file() else None
    return (
        None if fields is None or "run" not in fields else RunRecord(fields["run"], fields.get("continues"))
    )


def write_run(output_dir: Path, record: RunRecord) -> None:
    fields = {"run": record.run}
    if record.continues is not None:
        fields["continues"] = record.continues
    with atomic_write(output_dir / RUN_FILE) as file:
        storage.write_bytes(file, seal(**fields))


def run_of(path: Path) -> str | None:
    """Return the id of the training run that saved the checkpoint in a step directory, or None. Raises
    CheckpointError if the checkpoint is incomplete or damaged."""
    return _saved_by(path).run


def _saved_by(path: Path) -> _Saved:
    marker = read_marker(path)
    content = read_manifest(path, marker)
    sha256 = marker["manifest_sha256"]
    if sha256 not in _saved:
        manifest = Manifest.from_bytes(content, str(path / MANIFEST_FILE))
        files = frozenset((*manifest.files, *manifest.documents, MANIFEST_FILE, MARKER_FILE))
        _saved[sha256] = _Saved(manifest.run, step_directory(manifest.epoch, manifest.step), files)
    return _saved[sha256]


def _files_in(directory: Path) -> set[str]:
    return {
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }
