"""A tree of YAML values to the typed configuration, and its errors in words."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.fields import RuleError, Section
from ppfleetx.config.sections import RunConfig
from ppfleetx.config.tree import Node
from ppfleetx.config.words import describe, field_types, is_text_only, item_type, section_in

_MAX_ERRORS = 8
_NOTHING = object()

SectionT = TypeVar("SectionT", bound=Section)


def validate(tree: Node, root: type[RunConfig]) -> tuple[RunConfig, dict[str, str]]:
    """The typed configuration of ``tree`` and the place of every value in it.

    Raises:
        ConfigError: the first error, with further ones (up to eight) listed below it.
    """
    origins: dict[str, str] = {}
    plain = _to_plain(tree, root, "", origins)
    try:
        return root.model_validate(plain), origins
    except ValidationError as error:
        raise _config_error(error, plain, root, origins) from None


def section_of(section: type[SectionT], values: dict[str, Any]) -> SectionT:
    """One section of a configuration, from values that were not written in one.

    Raises:
        ConfigError: as :func:`validate`, with keys as they are in the section; there are no places to name.
    """
    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise _config_error(error, values, section, {}) from None


def violation_error(violation: RuleError, prefix: str, values: Any, origins: dict[str, str]) -> ConfigError:
    """``violation`` as an error that names every key concerned with its value and place."""
    keys = [f"{prefix}.{key}" if prefix else key for key in violation.keys]
    written = [key for key in keys if key in origins] or keys[:1]
    key, others = written[0], written[1:]
    value = _value_at(values, key)
    also = [f"{other} = {_value_at(values, other)!r} ({origins[other]})" for other in others]
    arguments = {} if value is _NOTHING else {"value": value}
    return ConfigError(
        violation.rule,
        key=key,
        place=_place_of(key, origins) or ("default" if origins else None),
        hint=f"[with {', '.join(also)}]" if also else None,
        **arguments,
    )


def _to_plain(node: Node, annotation: Any, key: str, origins: dict[str, str]) -> Any:
    """Python values of ``node`` as the field's type wants them; places go to ``origins``."""
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
        # A section with nothing below its name is a section of defaults.
        is_plain_section = isinstance(annotation, type) and issubclass(annotation, Section)
        return {} if is_plain_section else None
    if node.text is not None and annotation is not None and is_text_only(annotation):
        return node.text
    return node.value


def _config_error(
    error: ValidationError, plain: Any, root: type[Section], origins: dict[str, str]
) -> ConfigError:
    found: dict[str, ConfigError] = {}
    for detail in error.errors():
        one = _one_error(detail, plain, root, origins)
        found.setdefault(one.key or "", one)
    # A wrong item makes its list wrong too: the item says more.
    found = {key: one for key, one in found.items() if not any(k.startswith(f"{key}.") for k in found)}
    first, *rest = found.values()
    if not rest:
        return first
    shown = "".join(f"\n  {one}" for one in rest[: _MAX_ERRORS - 1])
    more = len(rest) - (_MAX_ERRORS - 1)
    tail = f"\n  and {more} more" if more > 0 else ""
    arguments = {} if first.value is None else {"value": first.value}
    hint = f"{first.hint or ''}\nfurther errors:{shown}{tail}".lstrip(" ")
    return ConfigError(first.rule, key=first.key, place=first.place, hint=hint, **arguments)


def _one_error(detail: ErrorDetails, plain: Any, root: type[Section], origins: dict[str, str]) -> ConfigError:
    section, annotation, path = _follow(detail["loc"], root)
    key = ".".join(path)
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, RuleError):
        return violation_error(cause, key, plain, origins)
    if detail["type"] == "missing":
        return ConfigError(
            f"is required ({describe(annotation)}) and is not given", key=key, place=_place_of(key, origins)
        )
    value, place = _value_at(plain, key), _place_of(key, origins)
    if detail["type"] == "extra_forbidden":
        rule = f"there is no such key in {'.'.join(path[:-1]) or 'a configuration'}."
        return ConfigError(rule, key=key, place=place, hint=_nearest(path, section, root))
    return ConfigError(f"must be {describe(annotation)}", key=key, value=value, place=place)


def _follow(location: tuple[int | str, ...], root: type[Section]) -> tuple[type[Section], Any, list[str]]:
    """Innermost section, field type and path of an error's location, without pydantic's union labels."""
    section: type[Section] = root
    annotation: Any = root
    path: list[str] = []
    for part in location:
        inner = section_in(annotation)
        if inner is not None and isinstance(part, str):
            if part == inner.__name__:
                continue
            section, annotation = inner, field_types(inner).get(part)
            path.append(part)
        elif item_type(annotation) is not None and isinstance(part, int):
            annotation = item_type(annotation)
            path.append(str(part))
        elif isinstance(part, str) and annotation is not None and _is_mapping(annotation):
            annotation = item_type(annotation)
            path.append(part)
    return section, annotation, path


def _is_mapping(annotation: Any) -> bool:
    return "a mapping (values" in describe(annotation)


def _value_at(values: Any, key: str) -> Any:
    for part in key.split("."):
        if isinstance(values, dict) and part in values:
            values = values[part]
        elif isinstance(values, (list, tuple)) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        else:
            return _NOTHING
    return values


def _place_of(key: str, origins: dict[str, str]) -> str | None:
    """Place of ``key`` or of the nearest mapping around it."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return None


def _nearest(path: list[str], section: type[Section], root: type[Section]) -> str:
    prefix = ".".join(path[:-1])
    here = difflib.get_close_matches(path[-1], field_types(section), n=3, cutoff=0.6)
    near = [f"{prefix}.{name}" if prefix else name for name in here]
    everywhere = all_keys(root)
    same_name = [key for key in everywhere if key.rpartition(".")[2] == path[-1]]
    near += [key for key in same_name if key not in near]
    if not near:
        elsewhere = [key for key in everywhere if key not in (path[0], prefix)]
        near = difflib.get_close_matches(".".join(path), elsewhere, n=2, cutoff=0.75)
    if near:
        return f"Did you mean {' or '.join(near[:3])}?"
    return f"Keys here: {', '.join(field_types(section))}."


def all_keys(root: type[Section], prefix: str = "") -> list[str]:
    """Dotted names of every key below ``root``, sections included."""
    keys = []
    for name, annotation in field_types(root).items():
        keys.append(prefix + name)
        section = section_in(annotation)
        if section is not None:
            keys += all_keys(section, f"{prefix}{name}.")
    return keys
