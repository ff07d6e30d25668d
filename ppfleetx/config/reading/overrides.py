"""Overrides of configuration values, from ``-o Section.key=value``, other options or Python arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ppfleetx.config.errors import UNSET, ConfigError, shown
from ppfleetx.config.field_annotations import accepts_only_strings, annotation_at, item_type
from ppfleetx.config.reading.parse import key_problem, parse_yaml
from ppfleetx.config.reading.tree import Node, copy_tree, node_of, plain_value, put, same_value, value_at
from ppfleetx.config.section import Section


@dataclass(frozen=True)
class Setting:
    """A value for a configuration key, set by an option other than ``-o`` or by a Python argument.

    Attributes:
        key: the dotted key.
        place: the name of the option or argument, for messages, e.g. ``--output``.
    """

    key: str
    value: Any
    place: str


Override = str | Setting
"""The string after ``-o``, or a :class:`Setting` with a typed value."""


def overridden_keys(overrides: Iterable[Override]) -> set[str]:
    return {one.key if isinstance(one, Setting) else one.partition("=")[0].strip() for one in overrides}


@dataclass(frozen=True)
class _Read:
    key: str
    path: tuple[str, ...]
    node: Node

    @property
    def place(self) -> str:
        return self.node.place


def apply_overrides(tree: Node, overrides: Sequence[Override], root: type[Section]) -> Node:
    """Return a copy of the configuration ``tree`` with the overrides applied in order.

    Unknown keys are accepted.

    Raises:
        ConfigError: an override is malformed, contradicts an earlier override, or has a key below a scalar.
    """
    numbers = count(1)
    read = [
        _Read(one.key, _path_of(one.key, one.place), node_of(one.value, one.place, one.key))
        if isinstance(one, Setting)
        else _read(one, f"-o override {next(numbers)}", root)
        for one in overrides
    ]
    _refuse_contradictions(read)
    tree = copy_tree(tree)
    for one in read:
        put(tree, one.path, one.node)
    return tree


def _read(text: str, place: str, root: type[Section]) -> _Read:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(
            f"{shown(text)} is not of the form Section.key=value.",
            place=place,
            hint="Example: Engine.max_steps=10.",
        )
    path = _path_of(key, place)
    return _Read(key, path, _read_value(value, annotation_at(root, path), key, place))


def _path_of(key: str, place: str) -> tuple[str, ...]:
    path = tuple(key.split("."))
    for part in path:
        if problem := key_problem(part):
            raise ConfigError(problem, key=key, place=place)
    return path


def _refuse_contradictions(read: Sequence[_Read]) -> None:
    for number, one in enumerate(read):
        for earlier in reversed(read[:number]):
            if earlier.path[: len(one.path)] == one.path and not _keeps(one, earlier):
                raise ConfigError(
                    f"is already set by {earlier.place.removeprefix('-o ')}"
                    f"{'' if earlier.key == one.key else f' ({earlier.key})'} to "
                    f"{shown(plain_value(earlier.node))}; give one of them",
                    key=one.key,
                    value=plain_value(one.node),
                    place=one.place,
                )


def _keeps(later: _Read, earlier: _Read) -> bool:
    """Return whether the value that the override ``earlier`` set is the same after the override ``later``.
    The caller ensures that ``later`` sets the key of ``earlier``, or a section that contains this key."""
    value = value_at(plain_value(later.node), earlier.path[len(later.path) :])
    return value is not UNSET and same_value(node_of(value, later.place), earlier.node)


def _read_value(text: str, annotation: Any, key: str, place: str) -> Node:
    text_field = annotation is not None and accepts_only_strings(annotation)
    try:
        node = parse_yaml(text, place)
    except ConfigError as error:
        if text_field:
            return Node(text, place)
        inner = "" if error.key is None else f" (at {error.key})"
        about = f"in the value{inner}," if error.rule.startswith("the ") else f"the value{inner}"
        raise ConfigError(f"{about} {error.rule}", key=key, value=text, place=place) from None
    if node is None:  # empty or only a YAML comment; a string field takes the comment as its value
        return Node(text, place) if text_field and text.strip() else Node(None, place, "")
    if text_field and node.text is not None:
        return Node(node.value, place, text)
    if text_field and isinstance(node.value, dict):
        return Node(text, place)
    if text_field and isinstance(node.value, list) and item_type(annotation) is None:
        return Node(text, place)
    return node
