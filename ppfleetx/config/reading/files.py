"""The text of a configuration file, and the names of places in messages."""

from __future__ import annotations

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
    """A configuration file that a program has written for itself.

    The user has never seen it, so messages name ``place``, where the values come from.
    """

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
    """The place of values that come from a model's directory."""
    return f"{_OF_A_MODEL}{shown_path(Path(directory))}"


def is_of_a_model(place: str) -> bool:
    """Whether :func:`model_in` made ``place``."""
    return place.startswith(_OF_A_MODEL)


def read_text(path: Path, *, key: str | None = None, value: str = UNSET, place: str | None = None) -> str:
    """The text of ``path``.

    Args:
        key, value, place: the entry that names the file, for messages; without them the path itself is the
            place.

    Raises:
        ConfigError: there is no such file, or it cannot be read, is too large, or not UTF-8.
    """
    entry = {"place": shown_path(path)} if key is None else {"key": key, "value": value, "place": place}
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"is larger than {MAX_FILE_BYTES:,} bytes, too large for a configuration", **entry
            )
        content = path.read_bytes()
    except IsADirectoryError:
        what = "is a directory" if key else "is a directory without a config.yaml"
        raise ConfigError(f"{what}; name the file in it", **entry) from None
    except FileNotFoundError:
        raise ConfigError("there is no such file", **entry) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", **entry) from None
    except ValueError as error:  # NUL or a lone surrogate in the name
        raise ConfigError(f"is not a file name: {error}", **entry) from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        rule = f"is not a text file in UTF-8 ({error.reason})"
        if content.startswith((b"\xff\xfe", b"\xfe\xff")):
            rule = "is UTF-16; save it as UTF-8"
        raise ConfigError(rule, place=f"{shown_path(path)}:{line}") from None


def shown_path(path: Path) -> str:
    """``path`` as a place in messages: escaped and cut if it is not printable."""
    text = str(path)
    return text if text.isprintable() and len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]!r}"
