"""Inspect the type annotations of configuration fields, for parsing, error messages and documentation."""

from __future__ import annotations

import difflib
import types
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ppfleetx.config.field_types import Says
from ppfleetx.config.reading.parse import shipped_yaml
from ppfleetx.config.registry import Registered
from ppfleetx.config.section import Section


@cache
def field_types(section: type[Section]) -> dict[str, Any]:
    """Map each field of the class ``section`` to its annotation, including ``Annotated`` parts."""
    hints = get_type_hints(section, include_extras=True)
    return {name: hints[name] for name in section.model_fields}


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union type as a tuple. For any other type, the tuple has only that
    type."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(part for arg in get_args(annotation) for part in members(arg))
    return (annotation,)


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def section_in(annotation: Any) -> type[Section] | None:
    """The section class that a field with this annotation may hold, or None."""
    for part in members(annotation):
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def item_type(annotation: Any) -> Any:
    """The type of a list's items or a mapping's values; None if the annotation allows neither."""
    for part in members(annotation):
        if get_origin(part) is tuple:
            return get_args(part)[0]
        if get_origin(part) is dict:
            return get_args(part)[1]
    return None


def key_type(annotation: Any) -> Any:
    """The type of a mapping's keys; None if the annotation allows no mapping."""
    return next((get_args(part)[0] for part in members(annotation) if get_origin(part) is dict), None)


def annotation_at(root: type[Section], path: Sequence[str]) -> Any:
    """The type of the field at ``path`` below the section ``root``; None if there is no such field."""
    annotation: Any = root
    for part in path:
        section = section_in(annotation)
        annotation = field_types(section).get(part) if section else item_type(annotation)
        if annotation is None:
            return None
    return annotation


def accepts_only_strings(annotation: Any) -> bool:
    """Whether a field accepts strings (or null) but no other scalars, such as numbers. In such a field,
    ``007`` in YAML stays a string."""
    scalars = []
    for part in members(annotation):
        bare = _bare(part)
        if get_origin(bare) is Literal:
            scalars += [isinstance(choice, str) for choice in get_args(bare)]
        elif bare is not type(None) and get_origin(bare) not in (tuple, dict) and section_in(part) is None:
            scalars.append(bare is str)
    return bool(scalars) and all(scalars)


def describe(annotation: Any) -> str:
    """Return a description of the values that a type accepts, such as ``an integer of at least 1, or
    null``."""
    words = [_describe_one(part) for part in members(annotation) if part is not type(None)]
    if type(None) in members(annotation):
        words.append("null")
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + ", or " + words[-1]


def _describe_one(part: Any) -> str:
    if get_origin(part) is Annotated and get_origin(_bare(part)) in (Union, types.UnionType):
        return describe(_bare(part))
    says = [meta.words for meta in getattr(part, "__metadata__", ()) if isinstance(meta, (Says, Registered))]
    if says:
        return says[-1]
    if get_origin(_bare(part)) is Literal:
        part = _bare(part)
        choices = [str(choice) for choice in get_args(part)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if get_origin(part) is tuple:
        args = get_args(part)
        count = "" if args[-1] is Ellipsis else f"{len(args)} items, "
        return f"a list ({count}each {describe(args[0])})"
    if get_origin(part) is dict:
        return f"a mapping (values: {describe(get_args(part)[1])})"
    return getattr(part, "SAYS", "a section (a mapping of keys)")


def nearest_keys(path: list[str], section: type[Section], root: type[Section]) -> str:
    """Return a hint for an unknown key: the most similar known keys, or else all keys of ``section``.

    Args:
        path: the parts of the unknown key within the section ``root``.
        section: the innermost known section on the path.
    """
    prefix = ".".join(path[:-1])
    everywhere = all_keys(root)

    def here(name: str) -> str:
        return f"{prefix}.{name}" if prefix else name

    meant = ppfleetx_key(path[-1]) or ""
    # If ``root`` is one section, its keys are without the section's name.
    near = [key for key in (meant, meant.partition(".")[2]) if key in everywhere]
    if near and (name := near[0].rpartition(".")[2]) in field_types(section):
        near = [here(name)]  # the section has a key of this name itself, such as Optimizer.groups.0
    near += [key for key in everywhere if key.rpartition(".")[2] == path[-1] and key not in near]
    if not near:
        near = [*map(here, difflib.get_close_matches(path[-1], field_types(section), n=3, cutoff=0.6))]
    if not near:
        elsewhere = [key for key in everywhere if key not in (path[0], prefix)]
        near = difflib.get_close_matches(".".join(path), elsewhere, n=2, cutoff=0.75)
    if near:
        return f"Did you mean {' or '.join(near[:3])}?"
    return f"Keys here: {', '.join(field_types(section))}."


@cache
def all_keys(root: type[Section], prefix: str = "") -> tuple[str, ...]:
    """The dotted names of all keys and sections below the section ``root``."""
    keys: list[str] = []
    for name, annotation in field_types(root).items():
        keys.append(prefix + name)
        section = section_in(annotation)
        if section is not None:
            keys += all_keys(section, f"{prefix}{name}.")
    return tuple(keys)


@cache
def keys_by_foreign_name() -> dict[str, str]:
    """Map option names of other toolkits to the ppfleetx keys with the same meaning."""
    names_of_key = shipped_yaml(Path(__file__).with_name("foreign_names.yaml"))
    return {name: key for key, names in names_of_key.items() for name in names.split()}


def ppfleetx_key(name: str) -> str | None:
    """Return the ppfleetx key with the same meaning as the option ``name`` of another toolkit; None if there
    is none."""
    return keys_by_foreign_name().get(name.strip("-").replace("-", "_").lower())
