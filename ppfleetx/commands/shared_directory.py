"""A temporary directory that the processes of one job on one machine fill once and use together.

Whoever comes first fills it, the others wait, and the last one to leave removes it. The kernel's locks decide
who is who: a process that is killed lets go of its own, and the next one goes on. What is left when all were
killed is removed by whoever makes such a directory next, for whatever job.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from ppfleetx.config.errors import CheckpointError

_READY = "READY"
_USERS = "USERS"
_CONTENT = "content"
# What the launcher tells all ranks of a job alike, and no two jobs at the same time.
_JOB = ("PADDLE_TRAINER_ENDPOINTS", "PADDLE_MASTER")


def shared_directory(
    source: Path, environ: Mapping[str, str], fill: Callable[[Path], None], stack: ExitStack
) -> Path:
    """The directory of this job that is made of ``source``; equal on all ranks of all machines. Processes
    that no launcher has started, and that use the same source, are one job.

    Args:
        source: a directory. One that has changed since is another one.
        environ: the environment, which tells the ranks of one job from those of another.
        fill: makes the directory, which is not there yet; called by one process of each machine.
        stack: this process needs the directory until it ends.

    Raises:
        CheckpointError: the place for it is somebody else's.
        Exception: whatever ``fill`` raises.
    """
    root = _root()
    place = root / _key(source, environ)
    _remove_abandoned(root, but=place)
    with _locked(root / f"{place.name}.lock"):
        if not (place / _READY).exists():
            shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
            place.mkdir()
            try:
                fill(place / _CONTENT)
            except BaseException:
                shutil.rmtree(place, ignore_errors=True)
                raise
            (place / _READY).touch()
        users = stack.enter_context((place / _USERS).open("a"))
        fcntl.flock(users, fcntl.LOCK_SH)
    stack.callback(_leave, root, place, users)
    return place / _CONTENT


def _leave(root: Path, place: Path, users: IO[str]) -> None:
    with _locked(root / f"{place.name}.lock") as lock:
        _remove(place, lock, users)


def _remove_abandoned(root: Path, *, but: Path) -> None:
    """Remove the directories whose users have all been killed. One that is just being filled, or left, is
    locked, and passed over."""
    for path in root.glob("*.lock"):
        place = path.with_suffix("")
        with contextlib.suppress(OSError), path.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if place != but and _is_still(path, lock):
                place.mkdir(exist_ok=True)
                with (place / _USERS).open("a") as users:
                    _remove(place, lock, users)


def _remove(place: Path, lock: IO[str], users: IO[str]) -> None:
    """Remove a directory and its lock, which this process holds, unless somebody uses it."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # somebody else's still
        return
    shutil.rmtree(place, ignore_errors=True)
    Path(lock.name).unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    """The file ``path``, which this process alone holds."""
    while True:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_still(path, file):  # not removed while this process waited
                yield file
                return


def _is_still(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _root() -> Path:
    """A directory that belongs to this user alone."""
    root = Path(tempfile.gettempdir()) / f"ppfleetx-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.lstat()
    if status.st_uid != os.getuid() or root.is_symlink() or status.st_mode & 0o022:
        raise CheckpointError(
            f"{root}, where this program puts what its processes share, can be changed by somebody else; "
            "remove it, or set TMPDIR to another place"
        )
    return root


def _key(source: Path, environ: Mapping[str, str]) -> str:
    job: list[str] = [environ.get(name, "") for name in _JOB]
    if not any(job):  # without a launcher: this installation, since another one may convert otherwise
        job = [__file__]
    files = sorted(
        (file.name, status.st_size, status.st_mtime_ns)
        for file in source.iterdir()
        if file.is_file() and (status := file.stat())
    )
    named = json.dumps([job, str(source.resolve()), files])
    return hashlib.sha256(named.encode()).hexdigest()[:24]
