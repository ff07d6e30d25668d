"""Validate a configuration that was read from YAML, and return it as typed sections."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ppfleetx.config.errors import ConfigError, RuleError, shown, shown_key
from ppfleetx.config.field_annotations import (
    accepts_only_strings,
    annotation_at,
    describe,
    field_types,
    item_type,
    key_type,
    nearest_keys,
    section_in,
)
from ppfleetx.config.field_types import MAX_COUNT
from ppfleetx.config.reading.tree import Node, value_at
from ppfleetx.config.section import Section
from ppfleetx.config.sections.root import RunConfig

_MAX_ERRORS = 8

SectionT = TypeVar("SectionT", bound=Section)


def validate(tree: Node) -> tuple[RunConfig, dict[str, str]]:
    """Build the typed configuration from ``tree``. Also returns where every value was written, by dotted key.

    Raises:
        ConfigError: a key is unknown or missing, or a value is wrong.
    """
    origins: dict[str, str] = {}
    plain = _to_plain(tree, RunConfig, "", origins)
    try:
        return RunConfig.model_validate(plain), origins
    except ValidationError as error:
        # For a key that is missing at the top level, name the file.
        raise _config_error(error, plain, RunConfig, {"": tree.place, **origins}) from None


def section_of(section: type[SectionT], values: dict[str, Any]) -> SectionT:
    """Build one section from values that do not come from a file.

    Raises:
        ConfigError: a key is unknown or missing, or a value is wrong. Keys in the message are relative to the
            section.
    """
    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise _config_error(error, values, section, {}) from None


def violation_error(violation: RuleError, values: Any, origins: dict[str, str]) -> ConfigError:
    """Turn ``violation`` into a ConfigError. Of the keys in ``violation.keys``, the message shows those that
    the user set: the value, and where it was written (``origins``). If the user set none of them, the message
    shows the first one with its default."""
    return ConfigError(**_violation(violation, "", values, origins))


def _violation(violation: RuleError, prefix: str, values: Any, origins: dict[str, str]) -> dict[str, Any]:
    keys = [f"{prefix}.{key}" if prefix else key for key in violation.keys]
    written = [key for key in keys if key in origins] or keys[:1]
    key, others = written[0], written[1:]
    also = [f"{other} = {shown(value_at(values, other.split('.')))} ({origins[other]})" for other in others]
    return {
        "rule": violation.rule,
        "key": key,
        "value": value_at(values, key.split(".")),
        "place": _place_of(key, origins) or ("default" if origins else None),
        "hint": f"[with {', '.join(also)}]" if also else None,
    }


def _to_plain(node: Node, annotation: Any, key: str, origins: dict[str, str]) -> Any:
    """Convert ``node`` to plain Python values for a field of type ``annotation``.

    Where each value was written is added to ``origins``, by dotted key.
    """
    if key:
        origins[key] = node.place
    if isinstance(node.value, dict):
        section = section_in(annotation)
        types = field_types(section) if section else {}
        default = None if section else item_type(annotation)
        return {
            name: _to_plain(child, types.get(name, default), f"{key}.{name}" if key else name, origins)
            for name, child in node.value.items()
        }
    if isinstance(node.value, list):
        item = item_type(annotation)
        return [_to_plain(child, item, f"{key}.{i}", origins) for i, child in enumerate(node.value)]
    if node.value is None:
        # An empty section means that all its keys have their defaults.
        is_plain_section = isinstance(annotation, type) and issubclass(annotation, Section)
        return {} if is_plain_section else None
    # A string field gets an unquoted scalar as it was written.
    if node.text is not None and annotation is not None and accepts_only_strings(annotation):
        return node.text
    return node.value


def _config_error(
    error: ValidationError, plain: Any, root: type[Section], origins: dict[str, str]
) -> ConfigError:
    details = error.errors(include_url=False, include_input=False)
    found: dict[str, ErrorDetails] = {}
    around: set[str] = set()
    for detail in details:
        key = _blamed(detail, root)
        if key not in found:
            found[key] = detail
            around.update(key[:dot] for dot, sign in enumerate(key) if sign == ".")
    # pydantic also reports the list around a wrong item; the item's error is more specific.
    telling = [detail for key, detail in found.items() if key not in around]
    first, *rest = (_one_error(detail, plain, root, origins) for detail in telling[:_MAX_ERRORS])
    if not rest:
        return ConfigError(**first)
    said = {first["hint"]}
    for one in rest:
        one["hint"] = None if one["hint"] in said else one["hint"]
        said.add(one["hint"])
    shown_rest = "".join(f"\n  {ConfigError(**one)}" for one in rest)
    more = len(telling) - _MAX_ERRORS
    tail = f"\n  and {more:,} more" if more > 0 else ""
    hint = f"{first['hint'] or ''}\nfurther errors:{shown_rest}{tail}"
    return ConfigError(**{**first, "hint": hint})


def _blamed(detail: ErrorDetails, root: type[Section]) -> str:
    """The dotted key that a pydantic error is about."""
    path = _follow(detail["loc"], root)[2]
    cause = detail.get("ctx", {}).get("error")
    return ".".join([*path, *cause.keys[:1]] if isinstance(cause, RuleError) else path)


def _one_error(
    detail: ErrorDetails, plain: Any, root: type[Section], origins: dict[str, str]
) -> dict[str, Any]:
    section, annotation, path = _follow(detail["loc"], root)
    key = ".".join(path)
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, RuleError):
        return _violation(cause, key, plain, origins)
    said = {"key": key, "place": _place_of(key, origins), "hint": None}
    if detail["type"] == "missing":
        is_model = len(path) == 2 and path[0] == "Model"
        hint = "A file that others name in _base_ may lack it." if is_model else None
        return {**said, "rule": f"is required ({describe(annotation)}) and is not given.", "hint": hint}
    if detail["type"] == "extra_forbidden":
        rule = f"there is no such key in {shown_key('.'.join(path[:-1])) or 'a configuration'}."
        return {**said, "rule": rule, "hint": nearest_keys(path, section, root)}
    if detail["loc"][-1] == "[key]":
        keys = key_type(annotation_at(root, path[:-1]))
        return {
            **said,
            "key": ".".join(path[:-1]),
            "rule": f"each key must be {describe(keys)}",
            "value": path[-1],
        }
    rule = f"must be {describe(annotation)}"
    if isinstance(cause, ValueError):
        rule += f" {cause}"
    if detail.get("ctx", {}).get("le") == MAX_COUNT:
        rule += ", and at most 2^63 - 1"
    return {**said, "rule": rule, "value": value_at(plain, path)}


def _follow(location: tuple[int | str, ...], root: type[Section]) -> tuple[type[Section], Any, list[str]]:
    """Resolve a pydantic location to (innermost section class, field type, parts of the dotted key)."""
    section: type[Section] = root
    annotation: Any = root
    path: list[str] = []
    for part in location:
        inner, item = section_in(annotation), item_type(annotation)
        if inner is not None and isinstance(part, str):
            if part == inner.__name__:  # inserted by pydantic for a union
                continue
            section, annotation = inner, field_types(inner).get(part)
            path.append(part)
        elif key_type(annotation) is not None or (item is not None and isinstance(part, int)):
            annotation = item
            path.append(str(part))
    return section, annotation, path


def _place_of(key: str, origins: dict[str, str]) -> str | None:
    """Return where ``key`` was written, such as ``file:line``. If that is unknown, return where the nearest
    section around ``key`` was written, or else None."""
    while key and key not in origins:
        key = key.rpartition(".")[0]
    return origins.get(key)
