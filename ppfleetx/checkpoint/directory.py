"""The output directory: finding checkpoints in it, locking it, clearing up and keeping the newest n."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ppfleetx.checkpoint import storage
from ppfleetx.checkpoint.convert.fleetx import is_fleetx, open_fleetx
from ppfleetx.checkpoint.foreign import described
from ppfleetx.checkpoint.manifest import (
    BEST_FILE,
    LATEST_FILE,
    MANIFEST_FILE,
    MARKER_FILE,
    is_rank_directory,
    parse_step_directory,
    seal,
    unseal,
)
from ppfleetx.checkpoint.reader import Checkpoint, open_checkpoint, read_marker
from ppfleetx.config.errors import CheckpointError
from ppfleetx.utils.files import atomic_write
from ppfleetx.utils.log import get_logger

# A checkpoint being written, one that made way for another of its name, one being deleted. The dot
# keeps them out of every search: under its plain name a checkpoint is always complete.
SAVING, REPLACED, DELETING = ".saving-", ".replaced-", ".deleting-"
_LOCK_FILE = ".lock"
_LOCK_SECONDS = 60.0
_thread_locks: dict[Path, threading.Lock] = {}
_thread_locks_guard = threading.Lock()


def resolve_checkpoint(path: str | Path, *, verify: bool = False) -> Path:
    """Step directory meant by `path`: itself, an output directory, a rank directory of a checkpoint, or what
    the file `latest` or `best` of an output directory names.

    A directory of FleetX (`model.pdparams`, or rank directories with one) is meant as it is, and its
    output directory means its last step.
    An output directory means what its `latest` says, or its newest complete checkpoint when there is no
    such file. Marker, manifest, file sizes and headers are checked; with `verify` all data too.

    Raises:
        CheckpointError: there is nothing sound where it should be; the message names the newest
            checkpoint that is good. For a checkpoint of another program it says how to convert it.
    """
    path = Path(path)
    if path.name in (LATEST_FILE, BEST_FILE) and path.is_file():
        return _follow(path, verify)
    if not path.is_dir():
        absent = f"there is no checkpoint directory {path}"
        raise CheckpointError(described(path) or f"{absent}{_instead(path.parent)}")
    if is_fleetx(path):
        return path
    if is_rank_directory(path.name):
        path = path.resolve().parent
    if parse_step_directory(path.name) or (path / MANIFEST_FILE).exists() or (path / MARKER_FILE).exists():
        return _sound(path, path.parent, verify)
    return _resolve_output_directory(path, verify)


def open_resolved(path: str | Path) -> Checkpoint:
    """Open a directory that `resolve_checkpoint` returned, be it ours or FleetX's.

    Raises CheckpointError as `open_checkpoint` and `read_fleetx` do.
    """
    path = Path(path)
    return open_fleetx(path) if is_fleetx(path) else open_checkpoint(path)


def newest_complete(output_dir: str | Path) -> Path | None:
    """The complete checkpoint saved last in `output_dir`, or None. Looks at the markers only."""
    complete = complete_checkpoints(output_dir)
    return complete[-1] if complete else None


def complete_checkpoints(output_dir: str | Path) -> list[Path]:
    """Checkpoints of `output_dir` with a sound marker, in the order they were saved."""
    found = []
    for path in _step_directories(Path(output_dir)):
        try:
            saved_at = int(read_marker(path)["saved_at_ns"])
        except CheckpointError:
            continue
        found.append((saved_at, parse_step_directory(path.name)[::-1], path))
    return [path for _, _, path in sorted(found)]


def newest_good(output_dir: str | Path, *, verify: bool = True) -> Checkpoint | None:
    """The checkpoint saved last that is undamaged; `verify` reads all its data to know.

    Damaged ones that are newer, and ones whose age cannot be told, are passed over with a warning each.
    """
    found, damage = _search_good(Path(output_dir), verify)
    for error in damage:
        get_logger().warning(f"passed over a checkpoint that is no good: {error}")
    return found


def _search_good(output_dir: Path, verify: bool) -> tuple[Checkpoint | None, list[CheckpointError]]:
    complete = complete_checkpoints(output_dir)
    damage = []
    for path in _step_directories(output_dir):
        if path not in complete:
            try:
                read_marker(path)
            except CheckpointError as error:
                damage.append(error)
    for path in reversed(complete):
        try:
            checkpoint = open_checkpoint(path)
            if verify:
                checkpoint.verify()
        except CheckpointError as error:
            damage.append(error)
            continue
        return checkpoint, damage
    return None, damage


def write_latest(output_dir: Path, name: str) -> None:
    """Let `latest` say that `name` is the checkpoint to continue from."""
    _write_pointer(output_dir / LATEST_FILE, name)


def write_best(checkpoint: Path, keep_max: int | None = None) -> None:
    """Let `best` beside a complete checkpoint name it: `keep_newest` spares it, and the former best no more.

    Raises CheckpointError when the file cannot be written.
    """
    try:
        with output_lock(checkpoint.parent):
            _write_pointer(checkpoint.parent / BEST_FILE, checkpoint.name)
            keep_newest(checkpoint.parent, keep_max)
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint.parent / BEST_FILE} could not be written: {describe_os_error(error)}"
        ) from error


def _write_pointer(path: Path, name: str) -> None:
    marker = read_marker(path.parent / name)
    with atomic_write(path) as file:
        storage.write_bytes(file, seal(checkpoint=name, manifest_sha256=marker["manifest_sha256"]))


def mend_latest(checkpoint: Checkpoint) -> None:
    """Let `latest` beside the newest good checkpoint name it, whatever a killed save or damage left in it.

    The run that continues there calls this; it may have nothing left to save.
    """
    output_dir, name = checkpoint.path.parent, checkpoint.path.name
    latest = output_dir / LATEST_FILE
    fields = unseal(latest.read_bytes()) if latest.exists() else None
    if fields is not None and fields.get("checkpoint") == name:
        return
    with output_lock(output_dir):
        write_latest(output_dir, name)


@contextlib.contextmanager
def output_lock(output_dir: Path) -> Iterator[None]:
    """Hold `output_dir` for saving, among threads and processes; the system lets go when a process dies."""
    with _thread_locks_guard:
        thread_lock = _thread_locks.setdefault(output_dir.resolve(), threading.Lock())
    # A record lock, because (unlike flock's) a child forked meanwhile does not inherit it.
    with thread_lock, (output_dir / _LOCK_FILE).open("ab") as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise CheckpointError(f"another process is saving a checkpoint into {output_dir}")
            time.sleep(0.1)
        yield


def clear_leftovers(output_dir: Path) -> None:
    """Remove what killed saves and deletions left. The caller holds the lock, so nothing of it is in use."""
    for path in sorted(output_dir.glob(f"{REPLACED}*")):
        original = output_dir / path.name.removeprefix(REPLACED)
        if not original.exists():  # killed between two renames: give the name back
            storage.rename(path, original)
    for prefix in (SAVING, REPLACED, DELETING):
        for path in output_dir.glob(f"{prefix}*"):
            remove_tree(path)


def publish(saved: Path, target: Path) -> None:
    """Give a complete checkpoint its name; one that has the name already is gone only afterwards."""
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
    """Delete a checkpoint such that, killed midway, it does not look like one any more."""
    hidden = path.with_name(f"{DELETING}{path.name}")
    storage.rename(path, hidden)
    remove_tree(hidden)


def keep_newest(output_dir: Path, keep_max: int | None) -> None:
    """Delete complete checkpoints until the newest `keep_max` and the best are left; incomplete directories
    are not touched.

    What cannot be deleted is reported and left: the new checkpoint is safe, and training goes on.
    """
    if keep_max is None:
        return
    best = output_dir / BEST_FILE
    fields = unseal(best.read_bytes()) if best.exists() else None
    spared = None if fields is None else fields.get("checkpoint")
    for path in complete_checkpoints(output_dir)[:-keep_max]:
        if path.name == spared:
            continue
        try:
            delete_checkpoint(path)
        except OSError as error:
            get_logger().warning(f"old checkpoint {path} could not be deleted: {error.strerror}")


def remove_tree(path: Path) -> None:
    """Delete a directory that no name leads to any more; what resists is left for the next save."""
    shutil.rmtree(path, ignore_errors=True)


def _resolve_output_directory(path: Path, verify: bool) -> Path:
    latest = path / LATEST_FILE
    if not latest.exists():
        newest = newest_complete(path)
        if newest is None:
            if of_fleetx := [child for child in _step_directories(path) if is_fleetx(child)]:
                return max(of_fleetx, key=lambda child: parse_step_directory(child.name))
            raise CheckpointError(described(path) or f"there is no complete checkpoint in {path}")
        return _sound(newest, path, verify)
    return _follow(latest, verify)


def _follow(pointer: Path, verify: bool) -> Path:
    """The checkpoint that `latest` or `best` names."""
    path = pointer.parent
    fields = unseal(pointer.read_bytes())
    if fields is None or parse_step_directory(fields.get("checkpoint", "")) is None:
        raise CheckpointError(f"{pointer} is damaged: its checksum is wrong{_instead(path)}")
    target = path / fields["checkpoint"]
    if not target.is_dir():
        raise CheckpointError(f"{pointer} names {target.name}, which does not exist{_instead(path)}")
    resolved = _sound(target, path, verify)
    if read_marker(resolved)["manifest_sha256"] != fields["manifest_sha256"]:
        # Killed between publishing a checkpoint under a name that was in use and writing the file.
        get_logger().warning(f"{target} is not the checkpoint {pointer} was written for, but a complete one")
    return resolved


def _sound(path: Path, output_dir: Path, verify: bool) -> Path:
    try:
        checkpoint = open_checkpoint(path)
        if verify:
            checkpoint.verify()
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_instead(output_dir, path)}") from error
    return path


def _instead(output_dir: Path, bad: Path | None = None) -> str:
    """Sentence that names the newest good checkpoint beside a bad one."""
    good, _ = _search_good(output_dir, verify=True)
    if good is None or (bad is not None and good.path.resolve() == bad.resolve()):
        return "; there is no good checkpoint beside it"
    return (
        f"; the newest good checkpoint is {good.path}: continue there with Engine.save_load.ckpt_dir, or "
        "with resume=auto in its output directory"
    )


def _step_directories(output_dir: Path) -> list[Path]:
    if not output_dir.is_dir():
        return []
    return [path for path in output_dir.iterdir() if path.is_dir() and parse_step_directory(path.name)]


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # either may mean that another process has it
        return False
    return True


def describe_os_error(error: OSError) -> str:
    """An operating system error in words, with the file it is about."""
    where = f" ({os.fsdecode(error.filename)})" if error.filename else ""
    return f"{error.strerror or error}{where}"
