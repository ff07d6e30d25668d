"""Errors a user can cause and repair. The tools print them as one message and exit with code 2."""

from __future__ import annotations

from typing import Any

_UNSET = object()


class UserError(ValueError):
    """Something the user asked for or supplied is wrong; the message says what and the rule it breaks."""


class ConfigError(UserError):
    """A configuration value breaks a rule.

    Args:
        rule: the rule in words, with the numbers it is about.
        key: dotted name of the key, e.g. ``Global.micro_batch_size``.
        value: the offending value; left out of the message when not given.
        place: where the value came from, e.g. ``pretrain.yaml:14``.
        hint: what to do about it.
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
        head = "" if key is None else (key if value is _UNSET else f"{key} = {value!r}")
        where = f" ({place})" if place else ""
        prefix = f"{head}{where}: " if head or where else ""
        super().__init__(f"{prefix}{rule}" + (f" {hint}" if hint else ""))
        self.rule, self.key, self.place, self.hint = rule, key, place, hint


class DataError(UserError):
    """A corpus or an index on disk is missing, damaged, or does not fit what was asked of it."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or does not fit the run that wants to load it."""
