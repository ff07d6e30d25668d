"""Read files that a user or another program wrote. Errors become one sentence that names the file."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ppfleetx.config.errors import CheckpointError, UserError, shown

MAX_JSON_BYTES = 64 * 1024 * 1024
_KINDS = {stat.S_ISDIR: "a directory", stat.S_ISFIFO: "a pipe", stat.S_ISCHR: "a device"}


@contextmanager
def opened(path: str | Path, error: type[UserError] = CheckpointError) -> Iterator[BinaryIO]:
    """Context manager: open a file for reading bytes.

    Raises:
        error: the file does not exist, is not a file, or cannot be opened or read.
    """
    file_status(path, error)
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror or reason}") from reason


def file_status(path: str | Path, error: type[UserError] = CheckpointError) -> os.stat_result:
    """Return the status of a file.

    Raises:
        error: the file does not exist, or is a directory, a pipe (which may have no writer) or a device.
    """
    try:
        status = Path(path).stat()
    except (OSError, ValueError) as reason:
        raise error(f"{path} cannot be read: {getattr(reason, 'strerror', None) or reason}") from reason
    for is_kind, kind in _KINDS.items():
        if is_kind(status.st_mode):
            raise error(f"{path} is {kind}, not a file")
    return status


@contextmanager
def os_errors(error: type[UserError]) -> Iterator[None]:
    """Context manager or decorator: turn an OSError into ``error``, which names the file."""
    try:
        yield
    except OSError as reason:
        raise error(f"{reason.filename or 'a file'}: {reason.strerror or reason}") from reason


def read_bounded(path: str | Path, max_bytes: int, error: type[UserError] = CheckpointError) -> bytes:
    """Return the content of a file. Raises ``error`` as :func:`opened` does, and if the file is longer than
    ``max_bytes``."""
    with opened(path, error) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise error(f"{path} has more than {max_bytes} bytes, which is too large for such a file")
    return content


def read_json(
    path: str | Path, *, max_bytes: int = MAX_JSON_BYTES, error: type[UserError] = CheckpointError
) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ``error`` as :func:`read_bounded` and :func:`parse_json`
    do."""
    return parse_json(read_bounded(path, max_bytes, error), str(path), error)


def parse_json(content: bytes, place: str, error: type[UserError] = CheckpointError) -> dict[str, Any]:
    """Return the object in JSON text.

    Raises:
        error: the text is not JSON (NaN and infinities are not), is not an object, or has a key twice.
    """
    try:
        text = content.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise error(f"{place} is nested too deeply") from None
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
