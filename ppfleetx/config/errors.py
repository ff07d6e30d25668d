"""Errors that are the user's to mend: one message, no traceback, exit code 2."""

from __future__ import annotations

from typing import Any

_UNSET = object()


class UserError(ValueError):
    """A mistake in what the user gave us. Tools print its message and exit with code 2."""


class PeerEndedError(RuntimeError):
    """Another process of the job has ended, and this one cannot go on. The cause is reported there."""


class ConfigError(UserError):
    """A wrong configuration.

    Args:
        rule: what is wrong and what would be right, as a sentence.
        key: dotted key, e.g. ``Model.num_layers``.
        value: the offending value, when there is one.
        place: where it was written, ``file:line`` or ``-o override 2``.
        hint: what to do about it, e.g. the nearest key.
    """

    def __init__(
        self,
        rule: str,
        *,
        key: str | None = None,
        value: Any = _UNSET,
        place: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.rule, self.key, self.place, self.hint = rule, key, place, hint
        self.value = None if value is _UNSET else value
        head = key or ""
        if key is not None and value is not _UNSET:
            head += f" = {value!r}"
        if place is not None:
            head += f" ({place})" if head else place
        message = f"{head}: {rule}" if head else rule
        super().__init__(f"{message} {hint}" if hint else message)


class DataError(UserError):
    """Corpus, index or tokenizer files that are missing, damaged or too small."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or does not fit the model."""
