"""``-o Section.key=value`` overrides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.fields import Section
from ppfleetx.config.tree import Node, parse_yaml
from ppfleetx.config.words import field_types, is_text_only, item_type, section_in


def apply_overrides(tree: Node, overrides: Sequence[str], root: type[Section]) -> Node:
    """``tree`` with the overrides applied in order; unknown keys are found when the result is validated."""
    seen: dict[str, int] = {}
    for number, text in enumerate(overrides, start=1):
        place = f"-o override {number}"
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key or not all(key.split(".")):
            raise ConfigError(
                f"{text!r} is not of the form Section.key=value.",
                place=place,
                hint="Example: Engine.max_steps=10.",
            )
        if key in seen:
            raise ConfigError(f"is already set by override {seen[key]}", key=key, value=value, place=place)
        seen[key] = number
        path = key.split(".")
        node = _read_value(value, _annotation_at(root, path), key, place)
        tree = _put(tree, path, node, key, place)
    return tree


def _annotation_at(root: type[Section], path: Sequence[str]) -> Any:
    """Type of the field at ``path``; None where the schema has no such field."""
    annotation: Any = root
    for part in path:
        section = section_in(annotation)
        annotation = field_types(section).get(part) if section else item_type(annotation)
        if annotation is None:
            return None
    return annotation


def _read_value(text: str, annotation: Any, key: str, place: str) -> Node:
    text_field = annotation is not None and is_text_only(annotation)
    try:
        node = parse_yaml(text, place)
    except ConfigError as error:
        if text_field:
            return Node(text, place)
        raise ConfigError(f"the value {error.rule}", key=key, value=text, place=place) from None
    if node is None:  # nothing, or only a YAML comment: to a text field that is a text like any other
        return Node(text, place) if text_field and text.strip() else Node(None, place, "")
    if text_field and node.text is not None:
        return Node(node.value, place, text)
    if text_field and isinstance(node.value, dict):
        return Node(text, place)
    if text_field and isinstance(node.value, list) and item_type(annotation) is None:
        return Node(text, place)
    return node


def _put(tree: Node, path: Sequence[str], node: Node, key: str, place: str) -> Node:
    """A copy of ``tree`` with ``node`` at ``path``; missing mappings on the way are made."""
    if not path:
        return node
    head, rest = path[0], path[1:]
    if isinstance(tree.value, list):
        index = _index(head, len(tree.value), key, place)
        items = list(tree.value)
        items[index] = _put(items[index], rest, node, key, place)
        return Node(items, tree.place)
    content = dict(tree.value) if isinstance(tree.value, dict) else {}
    content[head] = _put(content.get(head, Node(None, place)), rest, node, key, place)
    return Node(content, tree.place if isinstance(tree.value, dict) else place)


def _index(text: str, length: int, key: str, place: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"{text!r} is not an index of the list", key=key, place=place)
    if int(text) >= length:
        raise ConfigError(f"the list has {length} items, numbered from 0", key=key, place=place)
    return int(text)
