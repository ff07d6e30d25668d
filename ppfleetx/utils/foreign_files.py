"""Files that somebody else wrote: opened only where they are files, read only as far as is sensible.

What should be a file may be a directory, a pipe that nobody writes to, or a device without an end; JSON may
be gigabytes of brackets. What is read through here takes bounded time and memory; errors name the file.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ppfleetx.config.errors import CheckpointError, UserError, shown

MAX_JSON_BYTES = 64 * 1024 * 1024
MAX_JSON_VALUES = 2_500_000  # with the bytes above, less than 1 GB of Python's objects
MAX_JSON_DEPTH = 64
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@contextmanager
def opened(path: str | Path, error: type[UserError] = CheckpointError) -> Iterator[BinaryIO]:
    """Open a file to read bytes of it; failing to open or to read it, also within the block, is an ``error``.

    Raises:
        error: there is no such file, it is a directory, a pipe or a device, or it cannot be read.
    """
    file_status(path, error)
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror or reason}") from reason


def file_status(path: str | Path, error: type[UserError] = CheckpointError) -> os.stat_result:
    """Size and more of a file.

    Raises:
        error: there is no such file, or it is a directory, a pipe or a device.
    """
    if "\0" in str(path):
        raise error(f"{str(path)!r} is not the name of a file")
    try:
        status = os.stat(path)  # noqa: PTH116 - a Path would refuse the same names otherwise
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror or reason}") from reason
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise error(f"{path} is {_KINDS.get(kind, 'something else')}, not a file")
    return status


@contextmanager
def os_errors(error: type[UserError]) -> Iterator[None]:
    """What the operating system refuses within the block (or the decorated function) is an ``error``.

    For work with many files of a user's, where each may be unreadable, or a name too long.

    Raises:
        UserError: ``error``, with the name of the file and the reason.
    """
    try:
        yield
    except OSError as reason:
        raise error(f"{reason.filename or 'a file'}: {reason.strerror or reason}") from reason


def read_bounded(path: str | Path, max_bytes: int, error: type[UserError] = CheckpointError) -> bytes:
    """All of a file. Raises ``error`` as :func:`opened` does, and for a file of more than ``max_bytes``."""
    with opened(path, error) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise error(f"{path} has more than {max_bytes} bytes, too many for what it should be")
    return content


def read_json(
    path: str | Path, *, max_bytes: int = MAX_JSON_BYTES, error: type[UserError] = CheckpointError
) -> dict[str, Any]:
    """The object in a JSON file. Raises ``error`` as :func:`read_bounded` and :func:`parse_json` do."""
    return parse_json(read_bounded(path, max_bytes, error), str(path), error)


def parse_json(
    content: bytes,
    place: str,
    error: type[UserError] = CheckpointError,
    *,
    max_values: int = MAX_JSON_VALUES,
    max_depth: int = MAX_JSON_DEPTH,
) -> dict[str, Any]:
    """The object that bytes of JSON hold.

    Args:
        content: the bytes, UTF-8.
        place: what messages call it, the file's name.
        error: what to raise.
        max_values, max_depth: most values in it, nested ones included, and most levels of nesting.

    Raises:
        error: it is not JSON (Python's NaN and infinities are not), not an object, has a key twice in one
            object, or has more values or nesting than a file of this project has reason to.
    """
    # Each value but the first of its list or object follows a comma.
    if content.count(b",") + content.count(b"[") + content.count(b"{") > max_values:
        raise error(f"{place} holds more than {max_values} values, too many for what it should be")
    try:
        text = content.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise error(f"{place} is nested too deeply") from None
    except ValueError as reason:
        raise error(f"{place} is not sound JSON: {reason}") from reason
    if not isinstance(value, dict):
        raise error(f"{place} holds no JSON object at its top")
    if not _is_shallow(value, max_depth):
        raise error(f"{place} is nested more than {max_depth} levels deep")
    if b"\\u" in content and _SURROGATE.search(content):  # half of a character cannot be written anywhere
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise error(f"{place} holds a lone surrogate, which is not text") from None
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {shown(twice)} is there twice")
    return made


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a value of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {shown(text)} is too large")
    return value


def _is_shallow(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return True
    return False
