"""Maintain the output directory of checkpoints: its lock, its files ``latest`` and ``best``, and the
publication and deletion of checkpoints."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path

from ppfleetx.checkpoint import storage
from ppfleetx.checkpoint.manifest import (
    BEST_FILE,
    LATEST_FILE,
    MANIFEST_FILE,
    MARKER_FILE,
    read_sealed,
    seal,
)
from ppfleetx.checkpoint.reader import Checkpoint, read_marker
from ppfleetx.checkpoint.resolve_checkpoint import complete_checkpoints
from ppfleetx.checkpoint.run_ownership import Ownership, run_of
from ppfleetx.config.errors import CheckpointError
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.output_files import atomic_write, exclusive_lock, remove_unfinished

# Name prefixes of a checkpoint that is being written, replaced or deleted. The dot hides it from every
# search, so a checkpoint under a plain name is always complete.
SAVING, REPLACED, DELETING = ".saving-", ".replaced-", ".deleting-"
_LOCK_FILE = ".lock"
_LOCK_SECONDS = 60.0


def write_latest(output_dir: Path, name: str) -> None:
    _write_pointer(output_dir / LATEST_FILE, name)


def write_best(checkpoint: Path, ownership: Ownership) -> None:
    """Write the name of a complete checkpoint to the file ``best`` in its output directory, and delete old
    checkpoints with `keep_newest`. Raises CheckpointError if the file cannot be written."""
    try:
        with output_lock(checkpoint.parent):
            _write_pointer(checkpoint.parent / BEST_FILE, checkpoint.name)
            keep_newest(checkpoint.parent, ownership)
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint.parent / BEST_FILE} could not be written: {describe_os_error(error)}"
        ) from error


def _write_pointer(path: Path, name: str) -> None:
    marker = read_marker(path.parent / name)
    with atomic_write(path) as file:
        storage.write_bytes(file, seal(checkpoint=name, manifest_sha256=marker["manifest_sha256"]))


def repair_latest(checkpoint: Checkpoint) -> None:
    """Make the file ``latest`` name ``checkpoint``, the newest undamaged checkpoint of its output directory.

    Called when a run resumes. ``latest`` can then name another checkpoint: if a save was killed before it
    updated ``latest``, or if a newer checkpoint is damaged.
    """
    output_dir, name = checkpoint.path.parent, checkpoint.path.name
    latest = output_dir / LATEST_FILE
    fields = read_sealed(latest) if latest.exists() else None
    if fields is not None and fields.get("checkpoint") == name:
        return
    with output_lock(output_dir):
        write_latest(output_dir, name)


def output_lock(output_dir: Path) -> AbstractContextManager[None]:
    """Context manager that locks ``output_dir`` for saving. The lock is also released if the process
    ends. Raises CheckpointError if another process holds the lock for more than a minute."""
    refusal = CheckpointError(f"another process is saving a checkpoint into {output_dir}")
    return exclusive_lock(output_dir / _LOCK_FILE, refusal, seconds=_LOCK_SECONDS)


def clear_leftovers(output_dir: Path) -> None:
    """Remove the hidden files and directories that killed saves and deletions have left in ``output_dir``. An
    old checkpoint that a killed save had hidden, but not yet replaced by the new one, gets its name back. The
    caller must hold the :func:`output_lock`."""
    for path in sorted(output_dir.glob(f"{REPLACED}*")):
        original = output_dir / path.name.removeprefix(REPLACED)
        if not original.exists():  # killed between two renames
            storage.rename(path, original)
    for prefix in (SAVING, REPLACED, DELETING):
        for path in output_dir.glob(f"{prefix}*"):
            remove_tree(path)
    remove_unfinished(output_dir, (LATEST_FILE, BEST_FILE))


def ensure_replaceable(target: Path, ownership: Ownership | None) -> None:
    """Make sure that a run can save a checkpoint as ``target``. A damaged checkpoint at ``target`` is
    renamed. Raises CheckpointError if ``target`` exists and the run must not replace it."""
    if not (target.exists() or target.is_symlink()) or (ownership and ownership.may_replace(target)):
        return
    if not is_damaged(target) or (ownership and target.resolve() in ownership.spared):
        raise CheckpointError(
            f"{target} exists already. It is not replaced, because this run did not save it (or not all of "
            "its files), or was started from it. Move it away, or save into another directory "
            "(Engine.save_load.output_dir)"
        )
    names = (target.with_name(f"{target.name}.damaged{number or ''}") for number in count())
    aside = next(name for name in names if not name.exists())
    storage.rename(target, aside)
    get_logger().warning(f"a damaged checkpoint was in the way of a new one and was renamed to {aside}")


def is_damaged(path: Path) -> bool:
    """Return whether ``path`` is a checkpoint of ppfleetx whose manifest or file ``COMPLETE`` is damaged, or
    missing while the other exists. False for a symbolic link."""
    if path.is_symlink() or not any((path / name).is_file() for name in (MANIFEST_FILE, MARKER_FILE)):
        return False
    try:
        run_of(path)
    except CheckpointError:
        return True
    return False


def publish(saved: Path, target: Path) -> None:
    """Rename a finished checkpoint from its hidden path to its final path. An earlier checkpoint at the final
    path is deleted."""
    if not target.exists():
        storage.rename(saved, target)
        return
    if storage.exchange(saved, target):
        remove_tree(saved)
        return
    replaced = target.with_name(f"{REPLACED}{target.name}")
    storage.rename(target, replaced)
    storage.rename(saved, target)
    remove_tree(replaced)


def delete_checkpoint(path: Path) -> None:
    """Delete a checkpoint."""
    # An interrupted deletion leaves a hidden directory, which is not taken for a checkpoint.
    hidden = path.with_name(f"{DELETING}{path.name}")
    storage.rename(path, hidden)
    remove_tree(hidden)


def keep_newest(output_dir: Path, ownership: Ownership) -> None:
    """Delete a run's old checkpoints in ``output_dir``. The newest ``ownership.keep_max`` checkpoints, the
    best one, and those that the run was started from are kept. If a checkpoint cannot be deleted, a warning
    is logged."""
    if ownership.keep_max is None:
        return
    best = output_dir / BEST_FILE
    fields = read_sealed(best) if best.exists() else None
    spared = None if fields is None else fields.get("checkpoint")
    own = [path for path in complete_checkpoints(output_dir) if ownership.may_replace(path)]
    for path in own[: -ownership.keep_max]:
        if path.name == spared:
            continue
        try:
            delete_checkpoint(path)
        except OSError as error:
            get_logger().warning(f"old checkpoint {path} could not be deleted: {error.strerror}")


def remove_tree(path: Path) -> None:
    """Delete a hidden directory. Files that cannot be deleted stay until the next save."""
    shutil.rmtree(path, ignore_errors=True)


def describe_os_error(error: OSError) -> str:
    where = f" ({os.fsdecode(error.filename)})" if error.filename else ""
    return f"{error.strerror or error}{where}"
