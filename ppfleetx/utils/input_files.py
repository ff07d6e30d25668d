"""Read files that a user or another program has written. If a file cannot be used, the functions raise an
error that names the file: a CheckpointError, or an exception of the class given as ``error``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ppfleetx.config.errors import CheckpointError, UserError, shown

MAX_JSON_BYTES = 64 * 1024 * 1024


@contextmanager
def opened(path: str | Path, error: type[UserError] = CheckpointError) -> Iterator[BinaryIO]:
    """Context manager that opens a file to read bytes. Raises an exception of the class ``error`` if the file
    does not exist or cannot be read."""
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror or reason}") from reason


def first_bytes(path: str | Path) -> bytes:
    """Return the first 8 bytes of a file. Raises CheckpointError if the file cannot be read, or is only a Git
    LFS pointer."""
    with opened(path) as file:
        begin = file.read(8)
    if begin == b"version ":
        raise CheckpointError(f"{path} is the pointer that Git LFS leaves for a file; fetch the file itself")
    return begin


def file_status(path: str | Path, error: type[UserError] = CheckpointError) -> os.stat_result:
    """Return the result of ``os.stat``. Raises an exception of the class ``error`` if the file does not exist
    or cannot be accessed."""
    try:
        return Path(path).stat()
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror}") from reason


@contextmanager
def os_errors(error: type[UserError]) -> Iterator[None]:
    """Context manager or decorator that turns an OSError into an exception of the class ``error`` that names
    the file."""
    try:
        yield
    except OSError as reason:
        raise error(f"{reason.filename or 'a file'}: {reason.strerror or reason}") from reason


def read_bounded(path: str | Path, max_bytes: int, error: type[UserError] = CheckpointError) -> bytes:
    """Return the bytes of a file. Raises an exception of the class ``error`` if the file cannot be read, or
    is longer than ``max_bytes``."""
    with opened(path, error) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise error(f"{path} has more than {max_bytes} bytes, which is too large for such a file")
    return content


def read_json(
    path: str | Path, *, max_bytes: int = MAX_JSON_BYTES, error: type[UserError] = CheckpointError
) -> dict[str, Any]:
    """Read a JSON file that contains an object, and return it as a dictionary. Raises an exception of the
    class ``error`` if the file cannot be read, is longer than ``max_bytes``, or is not accepted by
    :func:`parse_json`."""
    return parse_json(read_bounded(path, max_bytes, error), str(path), error)


def parse_json(content: bytes, place: str, error: type[UserError] = CheckpointError) -> dict[str, Any]:
    """Parse JSON text that contains an object, and return it as a dictionary. ``place`` says where the text
    comes from. Raises an exception of the class ``error`` if the text is not valid JSON, has NaN or an
    infinity, is not an object, or has a duplicate key."""
    try:
        text = content.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except ValueError as reason:
        raise error(f"{place} is not valid JSON: {reason}") from reason
    if not isinstance(value, dict):
        raise error(f"{place} is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in made if names.count(key) > 1)
        raise ValueError(f"the key {shown(twice)} occurs twice")
    return made


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")
