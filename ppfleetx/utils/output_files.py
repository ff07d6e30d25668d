"""Files that a program writes: atomic writes, lock files, and checks whether a path can be written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import IO

from ppfleetx.config.errors import ConfigError

_RANDOM_CHARACTERS = 8  # random characters in names made by tempfile.mkstemp


@contextlib.contextmanager
def atomic_write(path: str | Path, mode: str = "wb", *, flush: bool = True) -> Iterator[IO]:
    """Context manager that yields a temporary file beside ``path``, and at the end renames it to ``path``. If
    the code inside raises an exception, the old file stays.

    Args:
        flush: whether to wait until the new file is on the disk.

    Raises:
        OSError: the file cannot be written, or ``path`` is a device or a pipe.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileExistsError(errno.EEXIST, "is a device or a pipe, not a file", str(path))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        encoding = None if "b" in mode else "utf-8"
        with os.fdopen(handle, mode, encoding=encoding) as file:
            yield file
            if flush:
                file.flush()
                os.fsync(file.fileno())
        # mkstemp makes files private; give them the permissions a plain open() would have.
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)
        Path(name).replace(path)
        if flush:
            fsync_dir(path.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise


def remove_unfinished(directory: Path, names: Iterable[str]) -> None:
    """Remove temporary files of :func:`atomic_write` from ``directory``. They remain if a process was killed
    while it wrote one of the files ``names``. Must not be called while another process writes these files."""
    for name in names:
        for path in directory.glob(f".{glob.escape(name)}.{'?' * _RANDOM_CHARACTERS}.tmp"):
            path.unlink(missing_ok=True)


def is_taken(path: Path) -> bool:
    """Return whether ``path`` is a file, or a directory that is not empty. New output at this path would
    replace the file or mix with the files in the directory."""
    return any(path.iterdir()) if path.is_dir() else path.exists()


def why_not_writable(directory: Path) -> str | None:
    """Return why no files can be written to ``directory``, or None if they can. A directory that does not
    exist counts as writable if it can be created."""
    # Unlike Path.exists, os.path.exists does not raise for an unreadable directory.
    places = (directory.absolute(), *directory.absolute().parents)
    there = next(path for path in places if os.path.exists(path))  # noqa: PTH110
    if not there.is_dir():
        return f"{there} is a file; name a directory"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"cannot be written: nothing may be created in {there}"
    return None


def refuse_unwritable(directory: Path, key: str) -> None:
    """Raise ConfigError if no files can be written to ``directory``, given by the option ``key``. Call this
    before a long computation whose results are written there."""
    rule = why_not_writable(directory)
    if rule is not None:
        raise ConfigError(rule, key=key, value=str(directory))


@contextlib.contextmanager
def writing(key: str | None, path: str | Path) -> Iterator[None]:
    """Context manager that turns an OSError into a ConfigError, which says that ``path`` cannot be written.
    ``key`` is the option that gave the path, or None."""
    try:
        yield
    except OSError as error:
        where = {"place": str(path)} if key is None else {"key": key, "value": str(path)}
        raise ConfigError(f"cannot be written: {error.strerror}", **where) from error


def refuse_as_new_file(path: Path, key: str) -> None:
    """Raise ConfigError if ``path``, given by the option ``key``, cannot be a new file: it exists, or its
    directory does not."""
    if path.exists():
        raise ConfigError("the file exists already; nothing is overwritten", key=key, value=path)
    if not path.parent.is_dir():
        raise ConfigError("its directory does not exist", key=key, value=path)


def put_aside(path: Path) -> Path:
    """Rename the file ``name.suffix`` to ``name.N.suffix``, where N is the first free number from 1. Returns
    the new path."""
    names = (path.with_suffix(f".{number}{path.suffix}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    return path.rename(aside)


def fsync_dir(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive_lock(path: Path, refusal: Exception, seconds: float = 0.0) -> Iterator[None]:
    """Context manager that locks the file ``path``, so that only one process at a time is in the block.
    Raises the exception ``refusal`` if another process still holds the lock after ``seconds``. The file is
    not deleted at the end."""
    deadline = time.monotonic() + seconds
    with path.open("ab") as file:
        while True:
            # A record lock: unlike a lock made by flock, a forked child does not inherit it.
            try:
                fcntl.lockf(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    raise refusal from None
            time.sleep(0.1)
        yield
