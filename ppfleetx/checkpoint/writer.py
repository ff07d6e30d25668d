"""Write a checkpoint under a hidden name, check it, and rename it. Each rank calls `write_rank`; then one
rank calls `commit` with the results of all ranks. :mod:`ppfleetx.checkpoint.manager` does this for a job."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ppfleetx.checkpoint import storage
from ppfleetx.checkpoint.manifest import (
    MANIFEST_FILE,
    MARKER_FILE,
    FileEntry,
    Manifest,
    TensorEntry,
    marker_of,
    step_directory,
)
from ppfleetx.checkpoint.output_dir import (
    SAVING,
    clear_leftovers,
    ensure_replaceable,
    keep_newest,
    output_lock,
    publish,
    remove_tree,
    write_latest,
)
from ppfleetx.checkpoint.reader import damage_of, open_checkpoint, read_marker
from ppfleetx.checkpoint.resolve_checkpoint import newest_complete
from ppfleetx.checkpoint.run_ownership import Ownership
from ppfleetx.checkpoint.slices import NUMPY_OF_DTYPE, OPTIMIZER, TensorSlice
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.message_text import counted
from ppfleetx.utils.output_files import fsync_dir

MAX_FILE_BYTES = 4 * 1024**3


@dataclass(frozen=True)
class RankIndex:
    """The files and tensor slices that one rank wrote into a checkpoint. Files are listed by path in the
    checkpoint."""

    files: Mapping[str, FileEntry]
    tensors: Sequence[TensorEntry]

    @property
    def directory(self) -> str:
        return next(iter(self.files)).split("/")[0]


@contextmanager
def saving(output_dir: Path, epoch: int, step: int) -> Iterator[Path]:
    """Context manager that locks ``output_dir`` and yields a new hidden directory for a checkpoint. On exit,
    the directory is deleted unless `commit` has renamed it."""
    staged = output_dir / f"{SAVING}{step_directory(epoch, step)}"
    output_dir.mkdir(parents=True, exist_ok=True)
    with output_lock(output_dir):
        clear_leftovers(output_dir)
        staged.mkdir()
        try:
            yield staged
        finally:
            remove_tree(staged)


def write_rank(
    staged: Path,
    rank_dir: str,
    tensors: Iterable[TensorSlice],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    verify: bool = True,
) -> RankIndex:
    """Write one rank's tensor slices into ``rank_dir`` of the unfinished checkpoint ``staged``, and flush
    them to disk. With ``verify``, the slices are read back, and CheckpointError is raised if a checksum
    differs."""
    target = staged / rank_dir
    target.mkdir()
    files: dict[str, FileEntry] = {}
    entries: dict[tuple[str, str, str], TensorEntry] = {}
    for file_name, pieces in split_into_files(list(tensors), max_file_bytes):
        relative = f"{rank_dir}/{file_name}"
        files[relative], slices = storage.write_safetensors(target / file_name, relative, pieces)
        for piece, entry in zip(pieces, slices, strict=True):
            known = entries.get(piece.key)
            earlier = known.slices if known else ()
            entries[piece.key] = TensorEntry(
                piece.name,
                piece.kind,
                piece.state,
                piece.dtype,
                piece.global_shape,
                (*earlier, entry),
                piece.vocab_dim,
            )
    fsync_dir(target)
    problems = list(damage_of(staged, entries.values())) if verify else []
    if problems:
        more = f", and {counted(len(problems) - 1, 'more piece')}" if len(problems) > 1 else ""
        raise CheckpointError(f"the data read back is not the data written: {problems[0]}{more}")
    return RankIndex(files, list(entries.values()))


def commit(
    staged: Path,
    manifest: Manifest,
    indices: Sequence[RankIndex],
    ownership: Ownership | None = None,
    documents: Mapping[str, bytes] | None = None,
) -> Path:
    """Finish a checkpoint that all ranks have written into the directory ``staged``: add the documents and
    the manifest, give the directory its final name, update the file ``latest``, and delete the run's old
    checkpoints. Returns the final path. Raises CheckpointError if the files are incomplete or damaged, or if
    the run must not replace a checkpoint of the same name."""
    files = {path: entry for index in indices for path, entry in index.files.items()}
    run = None if ownership is None else ownership.run
    written = storage.write_documents(staged, documents or {})
    manifest = replace(manifest, files=files, tensors=_merged(indices), run=run, documents=written)
    content = manifest.to_bytes()
    Manifest.from_bytes(content, "the checkpoint about to be saved")
    storage.write_small(staged / MANIFEST_FILE, content)
    output_dir = staged.parent
    storage.write_small(staged / MARKER_FILE, marker_of(content, _time_of_save(output_dir)))
    fsync_dir(staged)
    # Despite the marker, the directory is not found as a checkpoint yet, because its name is hidden.
    open_checkpoint(staged)
    target = output_dir / step_directory(manifest.epoch, manifest.step)
    ensure_replaceable(target, ownership)
    publish(staged, target)
    write_latest(output_dir, target.name)
    if ownership is not None:
        keep_newest(output_dir, ownership)
    return target


def _time_of_save(output_dir: Path) -> int:
    """Return the save time of a new checkpoint, in nanoseconds since 1970. It is later than the save time of
    every checkpoint in ``output_dir``, even if the clock was set back, because the newest checkpoint is found
    by its save time."""
    newest = newest_complete(output_dir)
    return max(time.time_ns(), 0 if newest is None else 1 + int(read_marker(newest)["saved_at_ns"]))


def _merged(indices: Sequence[RankIndex]) -> dict[tuple[str, str, str], TensorEntry]:
    merged: dict[tuple[str, str, str], TensorEntry] = {}
    for index in indices:
        for entry in index.tensors:
            known = merged.get(entry.key)
            if known is None:
                merged[entry.key] = entry
            elif (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(f"ranks disagree on shape or element type of {entry.name}")
            else:
                merged[entry.key] = replace(known, slices=(*known.slices, *entry.slices))
    return merged


def split_into_files(
    tensors: Sequence[TensorSlice], max_bytes: int
) -> Iterator[tuple[str, list[TensorSlice]]]:
    """Distribute slices over files of weights and of optimizer state, and yield (file name, its slices). The
    slices of a file have at most ``max_bytes`` together, unless the file has only one slice."""
    for stem, of_kind in (
        ("model", [piece for piece in tensors if piece.kind != OPTIMIZER]),
        ("optimizer", [piece for piece in tensors if piece.kind == OPTIMIZER]),
    ):
        # Wide elements come first, so that every tensor is aligned for readers that map the file.
        of_kind.sort(key=lambda piece: -NUMPY_OF_DTYPE[piece.dtype].itemsize)
        groups: list[list[TensorSlice]] = []
        room = 0
        for piece in of_kind:
            if not groups or piece.num_bytes > room:
                groups.append([])
                room = max_bytes
            groups[-1].append(piece)
            room -= piece.num_bytes
        if len(groups) == 1:
            yield f"{stem}.safetensors", groups[0]
            continue
        for number, group in enumerate(groups, start=1):
            yield f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors", group
