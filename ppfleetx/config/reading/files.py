"""Text of a configuration file: a regular file of bounded size, whatever its name leads to."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppfleetx.config.errors import UNSET, ConfigError

MAX_FILE_BYTES = 1 << 20
"""A resolved configuration with every key has about 10,000."""

_MAX_SHOWN = 400
_OF_A_MODEL = "the model in "


@dataclass(frozen=True)
class MadeFile:
    """A configuration that a program has written for itself. The user has never seen the file: messages name
    ``place``, where the values come from."""

    path: Path
    place: str


@dataclass(frozen=True)
class Sections:
    """A configuration that is in no file, as nested sections.

    Attributes:
        values: plain Python values.
        place: where they come from, for messages.
    """

    values: Mapping[str, Any]
    place: str


def model_in(directory: str | Path) -> str:
    """The place of what a model's directory says of itself."""
    return f"{_OF_A_MODEL}{shown_path(Path(directory))}"


def is_of_a_model(place: str) -> bool:
    """Whether ``place`` is what :func:`model_in` gave."""
    return place.startswith(_OF_A_MODEL)


_KINDS = (
    (stat.S_ISDIR, "is a directory; give the YAML file itself"),
    (stat.S_ISFIFO, "is a pipe; a configuration is a regular file"),
    (stat.S_ISCHR, "is a device; a configuration is a regular file"),
    (stat.S_ISBLK, "is a device; a configuration is a regular file"),
    (stat.S_ISSOCK, "is a socket; a configuration is a regular file"),
)


def read_text(path: Path, *, key: str | None = None, value: str = UNSET, place: str | None = None) -> str:
    """The text of ``path``.

    Args:
        key, value, place: of the entry that names the file, for the message; without them the path itself is
            the place.

    Raises:
        ConfigError: there is no such file, it is not a regular file, too large, or not UTF-8.
    """
    try:
        return _decoded(_content(path))
    except _UnreadableError as error:
        rule, line = str(error), error.line
    if key is None or line is not None:
        raise ConfigError(rule, place=shown_path(path) + ("" if line is None else f":{line}"))
    raise ConfigError(rule, key=key, value=value, place=place)


class _UnreadableError(Exception):
    """Why a file is not a configuration, and in which line where it is one."""

    def __init__(self, rule: str, line: int | None = None) -> None:
        self.line = line
        super().__init__(rule)


def _content(path: Path) -> bytes:
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        _require_regular(path.stat().st_mode)  # before it is opened, which does things to devices and pipes
        descriptor = os.open(path, flags)
        try:
            _require_regular(os.fstat(descriptor).st_mode)
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(MAX_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise _UnreadableError("there is no such file") from None
    except OSError as error:  # also: a name that is too long, a circle of links, no permission
        raise _UnreadableError(f"cannot be read: {error.strerror}") from None
    except ValueError as error:  # NUL in the name, or bytes that are no Unicode text
        raise _UnreadableError(f"is not the name of a file: {error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise _UnreadableError(f"is larger than {MAX_FILE_BYTES:,} bytes, which no configuration needs")
    return content


def _require_regular(mode: int) -> None:
    for is_kind, rule in _KINDS:
        if is_kind(mode):
            raise _UnreadableError(rule)


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        if content.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise _UnreadableError("is UTF-16; save it as UTF-8") from None
        raise _UnreadableError(f"is not a text file in UTF-8 ({error.reason})", line) from None


def shown_path(path: Path) -> str:
    """``path`` as a place in messages: escaped or cut where it is not a name that one would print."""
    text = str(path)
    return text if text.isprintable() and len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]!r}"
