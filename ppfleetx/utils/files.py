"""Files that are whole or absent: atomic writes, fsync, locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import IO

from ppfleetx.config.errors import ConfigError

_RANDOM_CHARACTERS = 8  # that tempfile.mkstemp puts into a name


@contextlib.contextmanager
def atomic_write(path: str | Path, mode: str = "wb") -> Iterator[IO]:
    """Open a temporary file beside ``path``; on success flush it to disk and rename it to ``path``.

    Readers see the old file or the new one, never a part. On an exception the temporary file is removed.

    Raises:
        OSError: it cannot be written, or ``path`` is a device or a pipe, which a rename would replace.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileExistsError(errno.EEXIST, "is a device or a pipe, not a file", str(path))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        encoding = None if "b" in mode else "utf-8"
        with os.fdopen(handle, mode, encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private; give them the permissions a plain open() would have.
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)
        Path(name).replace(path)
        fsync_dir(path.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise


def remove_unfinished(directory: Path, names: Iterable[str]) -> None:
    """Remove what killed processes left of an :func:`atomic_write` to these files of ``directory``.

    Nobody may be writing them meanwhile.
    """
    for name in names:
        for path in directory.glob(f".{glob.escape(name)}.{'?' * _RANDOM_CHARACTERS}.tmp"):
            path.unlink(missing_ok=True)


def is_taken(path: Path) -> bool:
    """Whether anything but an empty directory is at ``path``: what is written there would mix with it."""
    return any(path.iterdir()) if path.is_dir() else path.exists()


def why_not_writable(directory: Path) -> str | None:
    """Why nothing can be written into ``directory``, which need not exist yet; None if it can."""
    # os.path.exists, which does not raise where a directory may not be looked into.
    places = (directory.absolute(), *directory.absolute().parents)
    there = next(path for path in places if os.path.exists(path))  # noqa: PTH110
    if not there.is_dir():
        return f"{there} is a file; name a directory"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"cannot be written: nothing may be created in {there}"
    return None


def refuse_unwritable(directory: Path, key: str) -> None:
    """Raise ConfigError, before any work is done, where the option ``key`` names no possible directory."""
    rule = why_not_writable(directory)
    if rule is not None:
        raise ConfigError(rule, key=key, value=str(directory))


def refuse_as_new_file(path: Path, key: str) -> None:
    """Raise ConfigError where the option ``key`` names a file that exists, or a directory that does not."""
    if path.exists():
        raise ConfigError("there is a file of that name already; nothing is overwritten", key=key, value=path)
    if not path.parent.is_dir():
        raise ConfigError("its directory does not exist", key=key, value=path)


def put_aside(path: Path) -> Path:
    """Rename a file to the first free one of ``name.1.suffix``, ``name.2.suffix``, ...; the new name."""
    names = (path.with_suffix(f".{number}{path.suffix}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    return path.rename(aside)


def fsync_dir(path: str | Path) -> None:
    """Make a rename or unlink inside the directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive_lock(path: Path, refusal: Exception) -> Iterator[None]:
    """Hold ``path`` as a lock file; raise ``refusal`` at once when another process holds it.

    The system lets go when the process dies, however it dies; the empty file stays.
    """
    with path.open("ab") as file:
        try:
            fcntl.lockf(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise refusal from None
        yield
