"""The engine of all dialects: look each given key up, convert its value, then apply the joint rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ppfleetx.config.errors import ConfigError, shown
from ppfleetx.dialects.given import Given
from ppfleetx.dialects.keys import Key, KeyTable, Kind
from ppfleetx.dialects.translation import Translation

Rule = Callable[[Translation], None]
"""Reads keys that decide native values together, and puts those into the translation."""


def translate(
    dialect: str, place: str, given: Iterable[Given], table: KeyTable, rules: Sequence[Rule] = ()
) -> Translation:
    """Native values of everything that is given.

    Args:
        dialect: the toolkit's name.
        place: the file or command line, for messages about what is missing.
        given: its values; later ones of the same name replace earlier ones.
        table: what its keys mean.
        rules: applied in order, after the keys that mean something alone.

    Raises:
        ConfigError: an unknown or refused key, an unsupported value, or values that contradict each other;
            with key, value and place as the user wrote them.
    """
    result = Translation(dialect, place)
    found: dict[str, tuple[Given, Key]] = {}
    unknown: list[Given] = []
    for one in given:
        key = table.find(one.key)
        if key is None:
            if one.value is not None or not table.is_block(one.key):  # else a block with nothing in it
                unknown.append(one)
            continue
        name = one.key if "*" in key.name else key.name
        found.pop(name, None)
        found[name] = (one, key)
    _refuse_first(found, table)
    if unknown:
        raise _unknown(unknown[0], table, dialect)
    for name, (one, key) in found.items():
        result.given[name] = one
        if one.value is not None:
            _take(one, key, result)
    for rule in rules:
        rule(result)
    return result


def _refuse_first(found: Mapping[str, tuple[Given, Key]], table: KeyTable) -> None:
    """Raise for unsupported keys in table order: the kind of network comes before its details."""
    given = {key.name: one for one, key in found.values() if one.value is not None}
    for key in table.keys:
        if key.name in given and key.kind is Kind.REFUSED:
            one = given[key.name]
            raise ConfigError(key.says, key=one.key, value=one.value, place=one.place)
        if key.name in given and key.kind is Kind.FIXED:
            _check_fixed(given[key.name], key)


def _unknown(one: Given, table: KeyTable, dialect: str) -> ConfigError:
    if table.is_block(one.key):
        return ConfigError("must be a mapping of keys", key=one.key, value=one.value, place=one.place)
    return ConfigError(
        f"{dialect} has no such key, or this program does not know it.",
        key=one.key,
        place=one.place,
        hint=table.nearest(one.key),
    )


def _take(one: Given, key: Key, result: Translation) -> None:
    if key.kind is Kind.UNUSED:
        result.unused.append(one)
    elif key.kind is Kind.FIXED:
        result.fixed.append((one, key.says))
    elif key.convert is not None:
        for native, value in _converted(one, key).items():
            result.put(native, value, one)


def _check_fixed(one: Given, key: Key) -> None:
    accepts = key.accepts
    if accepts is None or any(type(one.value) is type(value) and one.value == value for value in accepts):
        return
    raise ConfigError(
        f"can only be {' or '.join(map(shown, accepts))}: {key.says}",
        key=one.key,
        value=one.value,
        place=one.place,
    )


def _converted(one: Given, key: Key) -> Mapping[str, Any]:
    try:
        value = key.convert(one.value)
    except ValueError as error:
        rule = error.rule if isinstance(error, ConfigError) else str(error)
        raise ConfigError(rule, key=one.key, value=one.value, place=one.place) from None
    if isinstance(value, Mapping):
        return value
    return dict.fromkeys(key.to, value)
