"""Errors that a user can fix. Commands print the message without a traceback, and exit with code 2.

Code that reads a configuration raises ConfigError for any mistake in it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

UNSET: Any = object()
"""Sentinel for "no value", where None is a valid value."""

_MAX_TEXT = 200  # enough for most paths
_MAX_KEY = 120

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _MAX_TEXT
_short.maxlist = _short.maxtuple = _short.maxset = 8
_short.maxdict, _short.maxlevel, _short.maxlong = 6, 3, 40


def shown(value: Any) -> str:
    """Format ``value`` for an error message like ``repr``, but shortened to a line or two."""
    if isinstance(value, PurePath):
        value = str(value)
    if isinstance(value, str) and len(value) > _MAX_TEXT:
        return f"{value[:_MAX_TEXT]!r}... ({len(value):,} characters)"
    return _short.repr(value)


def shown_key(key: str) -> str:
    """Format a dotted key for an error message, with control characters escaped and a long key shortened."""
    text = key if key.isprintable() else repr(key)[1:-1]
    return text if len(text) <= _MAX_KEY else f"{text[: _MAX_KEY - 40]}...{text[-37:]}"


class UserError(ValueError):
    """A mistake in the user's input. Commands print its message and exit with code 2."""


@contextmanager
def naming(option: str, value: object) -> Iterator[None]:
    """Context manager for a block that may raise a CheckpointError. Puts ``option = value:`` before the
    message of the error."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{option} = {shown(str(value))}: {error}") from error


class OutOfMemoryError(RuntimeError):
    """The host or the accelerator is out of memory. Commands print the message and exit with code 5."""


class DeviceError(RuntimeError):
    """The accelerator has reported an error. Commands print its message and exit with code 6."""


class PeerEndedError(RuntimeError):
    """Another process of the job has ended, so this one cannot continue. The other process reports the
    cause."""


class ConfigError(UserError):
    """A mistake in the configuration. The message says what is wrong and where it was written.

    Args:
        rule: a sentence that says what is wrong and what would be right.
        key: the dotted key, e.g. ``Model.num_layers``.
        place: where the value was written, ``file:line`` or ``-o override 2``.
        hint: advice, e.g. the nearest known key.
    """

    def __init__(
        self,
        rule: str,
        *,
        key: str | None = None,
        value: Any = UNSET,
        place: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.rule, self.key, self.place, self.hint = rule, key, place, hint
        self.value = None if value is UNSET else value
        head = "" if key is None else shown_key(key) or "''"
        if key is not None and value is not UNSET:
            head += f" = {shown(value)}"
        if place is not None:
            head += f" ({place})" if head else place
        message = f"{head}: {rule}" if head else rule
        super().__init__(message if not hint else f"{message}{'' if hint.startswith(chr(10)) else ' '}{hint}")


class DataError(UserError):
    """Data are missing, damaged or unusable: a corpus, an index, a tokenizer, text or token ids."""


class MissingDataError(DataError):
    """The data that the user named do not exist."""


class CheckpointError(UserError):
    """A checkpoint is missing or damaged, or does not fit the model."""


class RuleError(ValueError):
    """Configuration values are valid one by one but do not fit together.

    ``keys`` are the dotted keys of these values, relative to their section. The key that is most likely wrong
    comes first.
    """

    def __init__(self, keys: Sequence[str], rule: str) -> None:
        self.keys, self.rule = tuple(keys), rule
        super().__init__(f"{', '.join(keys)}: {rule}")
