"""Typed access to what a user gave, with errors in the user's own words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ppfleetx.config.errors import ConfigError, shown
from ppfleetx.dialects.given import Given


class Reading:
    """The values of a source by their names in the key table.

    Every ``get``-like method takes a default for a key that is not given or has no value.

    Args:
        given: values by table name.
    """

    def __init__(self, given: dict[str, Given]) -> None:
        self.given = given

    def __contains__(self, key: str) -> bool:
        return key in self.given and self.given[key].value is not None

    def origins(self, *keys: str) -> tuple[Given, ...]:
        """The given ones of ``keys``, to say where a native value came from."""
        return tuple(self.given[key] for key in keys if key in self)

    def value(self, key: str, default: Any = None) -> Any:
        """The value, of whatever type it is."""
        return self.given[key].value if key in self else default

    def integer(self, key: str, default: Any = None, *, least: int | None = None) -> Any:
        """An integer, at least ``least``.

        Raises:
            ConfigError: the value is something else; it names key, value and place.
        """
        value = self.value(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "must be an integer")
        if least is not None and value < least:
            raise self.error(key, f"must be at least {least}")
        return value

    def number(self, key: str, default: Any = None, *, least: float | None = None) -> Any:
        """A finite number, at least ``least``.

        Raises:
            ConfigError: the value is something else.
        """
        value = self.value(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, "must be a number")
        if least is not None and value < least:
            raise self.error(key, f"must be at least {least:g}")
        return float(value)

    def flag(self, key: str, default: Any = None) -> Any:
        """true or false.

        Raises:
            ConfigError: the value is something else.
        """
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def text(self, key: str, default: Any = None) -> Any:
        """A text that is not empty, as it was written.

        Raises:
            ConfigError: the value is something else.
        """
        if key not in self:
            return default
        one = self.given[key]
        value = one.value if isinstance(one.value, str) or one.text is None else one.text
        if not isinstance(value, str) or not value.strip():
            raise self.error(key, "must be a text")
        return value

    def choice(self, key: str, choices: Iterable[Any], default: Any = None) -> Any:
        """One of ``choices``.

        Raises:
            ConfigError: the value is something else.
        """
        value = self.value(key)
        if value is None:
            return default
        choices = list(choices)
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise self.error(key, f"must be one of {', '.join(map(shown, choices))}")
        return value

    def error(self, key: str, rule: str, hint: str | None = None) -> ConfigError:
        """An error about a key that is given."""
        one = self.given[key]
        return ConfigError(rule, key=one.key, value=one.value, place=one.place, hint=hint)

    def conflict(self, keys: Sequence[str], rule: str) -> ConfigError:
        """An error about several keys; the first given one is named first."""
        first, *others = self.origins(*keys)
        also = ", ".join(f"{one.key} = {shown(one.value)} ({one.place})" for one in others)
        return ConfigError(
            rule, key=first.key, value=first.value, place=first.place, hint=f"[with {also}]" if also else None
        )
