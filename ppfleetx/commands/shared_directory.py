"""A temporary directory that the processes of one job on one machine fill once and use together.

The first process fills it, the others wait, and the last one to leave removes it. A file lock decides: it is
held exclusively to fill or remove the directory, and shared to use it. A process that is killed loses its
lock; the next call, for whatever job, removes directories that nobody uses.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from ppfleetx.config.errors import CheckpointError

_READY = "READY"
_CONTENT = "content"
# The launcher sets these alike for all ranks of a job, and differently for two jobs at a time.
_JOB = ("PADDLE_TRAINER_ENDPOINTS", "PADDLE_MASTER")


def shared_directory(
    source: Path, environ: Mapping[str, str], fill: Callable[[Path], None], stack: ExitStack
) -> Path:
    """The directory that this job makes of ``source``; equal on all ranks of all machines. Processes without
    a launcher that use the same source are one job.

    Args:
        source: a directory. Once it has changed, it counts as another one.
        environ: the environment, which tells the ranks of one job from those of another.
        fill: makes the directory, which does not exist yet; called by one process of each machine.
        stack: this process needs the directory until it ends.

    Raises:
        CheckpointError: the directory around it belongs to somebody else.
        Exception: whatever ``fill`` raises.
    """
    root = _root()
    place = root / _key(source, environ)
    for path in root.glob("*.lock"):
        if path.stem != place.name:
            with path.open("a") as lock:
                _remove_if_unused(path.with_suffix(""), lock)
    lock = stack.enter_context((root / f"{place.name}.lock").open("a"))
    fcntl.flock(lock, fcntl.LOCK_SH)
    if not (place / _READY).exists():
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for a process that is filling it
        try:
            _fill(place, fill)
        except BaseException:
            lock.close()
            raise
        fcntl.flock(lock, fcntl.LOCK_SH)
    stack.callback(_remove_if_unused, place, lock)
    return place / _CONTENT


def _fill(place: Path, fill: Callable[[Path], None]) -> None:
    if (place / _READY).exists():
        return
    shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
    place.mkdir()
    try:
        fill(place / _CONTENT)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    (place / _READY).touch()


def _remove_if_unused(place: Path, lock: IO[str]) -> None:
    """Remove a directory unless another process uses it. Its lock file stays: a process may wait for it."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(place, ignore_errors=True)


def _root() -> Path:
    """A directory that belongs to this user alone."""
    root = Path(tempfile.gettempdir()) / f"ppfleetx-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.lstat()
    if status.st_uid != os.getuid() or root.is_symlink() or status.st_mode & 0o022:
        raise CheckpointError(
            f"{root}, which the processes of a job share, can be changed by somebody else; remove it, or set "
            "TMPDIR to another place"
        )
    return root


def _key(source: Path, environ: Mapping[str, str]) -> str:
    job: list[str] = [environ.get(name, "") for name in _JOB]
    if not any(job):  # without a launcher: this installation, since another one may convert differently
        job = [__file__]
    files = sorted(
        (file.name, status.st_size, status.st_mtime_ns)
        for file in source.iterdir()
        if file.is_file() and (status := file.stat())
    )
    named = json.dumps([job, str(source.resolve()), files])
    return hashlib.sha256(named.encode()).hexdigest()[:24]
