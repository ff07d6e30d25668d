"""Trees of configuration values that record where each value was written: parse scalars, compare, merge."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppfleetx.config.errors import UNSET, ConfigError, shown
from ppfleetx.config.message_text import counted

_INT = re.compile(r"[-+]?\d+(_\d+)*", re.ASCII)
_FLOAT = re.compile(
    r"[-+]?(\d+(_\d+)*\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?|[-+]?\.inf|\.nan", re.IGNORECASE | re.ASCII
)
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL", "None"), None),
    **dict.fromkeys(("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"), False),
}


@dataclass(slots=True)
class Node:
    """A value in a configuration tree. A dict or list contains further nodes.

    Attributes:
        place: where the value was written, e.g. ``file:line``.
        text: an unquoted scalar as it was written, e.g. ``007``.
    """

    value: Any
    place: str
    text: str | None = None


def plain_scalar(text: str) -> Any:
    """Parse an unquoted YAML scalar. Unlike in YAML 1.1, ``2e-5`` is a number, and ``1:30`` is a string."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def is_index(text: str) -> bool:
    """Whether ``text`` can be the index of a list item, i.e. consists of a few ASCII digits."""
    return text.isascii() and text.isdigit() and len(text) < 10


def is_argument(place: str) -> bool:
    """Whether a value was given by an option or a Python argument, not by a file. ``place`` is where it was
    written."""
    return place.startswith("-") or place.isidentifier()


def node_of(value: Any, place: str, key: str | None = None) -> Node:
    """Convert plain Python values to a tree of nodes, all with the same ``place``.

    Raises:
        ConfigError: a value has a type that a configuration cannot hold.
    """
    above = "" if key is None else f"{key}."
    if isinstance(value, Mapping):
        items = {str(name): node_of(item, place, f"{above}{name}") for name, item in value.items()}
        return Node(items, place)
    if isinstance(value, list | tuple):
        return Node([node_of(item, place, f"{above}{i}") for i, item in enumerate(value)], place)
    if isinstance(value, os.PathLike):
        return Node(os.fspath(value), place)
    if value is None or isinstance(value, bool | str):
        return Node(value, place)
    if isinstance(value, int | float):
        return Node(value, place, str(value))
    raise ConfigError(f"a configuration holds no {type(value).__name__}", key=key, place=place)


def nested(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Build nested dicts from pairs (dotted key, value), such as ``("Model.num_layers", 2)``."""
    tree: dict[str, Any] = {}
    for key, value in values:
        *sections, name = key.split(".")
        section = tree
        for one in sections:
            section = section.setdefault(one, {})
        section[name] = value
    return tree


def copy_tree(node: Node) -> Node:
    if isinstance(node.value, dict):
        return Node({key: copy_tree(child) for key, child in node.value.items()}, node.place, node.text)
    if isinstance(node.value, list):
        return Node([copy_tree(child) for child in node.value], node.place, node.text)
    return Node(node.value, node.place, node.text)


def put(tree: Node, path: Sequence[str], node: Node) -> None:
    """Store a copy of ``node`` in ``tree`` at the keys and indices in ``path``, and create missing mappings.

    Raises:
        ConfigError: the path leads through a scalar, or an index is outside its list.
    """
    for depth, part in enumerate(path):
        where: Any = part
        if isinstance(tree.value, list):
            if not is_index(part) or int(part) >= len(tree.value):
                items = counted(len(tree.value), "item")
                rule = f"{shown(part)} is not an index of the list, which has {items}, numbered from 0"
                raise ConfigError(rule, key=".".join(path), place=node.place)
            where = int(part)
        elif tree.value is None:
            tree.value, tree.text, tree.place = {}, None, node.place
        elif not isinstance(tree.value, dict):
            rule = f"{'.'.join(path[:depth])} is a single value ({tree.place}), not a section"
            raise ConfigError(rule, key=".".join(path), place=node.place)
        if depth == len(path) - 1:
            tree.value[where] = copy_tree(node)
        elif isinstance(tree.value, list):
            tree = tree.value[where]
        else:
            tree = tree.value.setdefault(where, Node({}, node.place))


def plain_value(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {key: plain_value(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain_value(child) for child in node.value]
    return node.value


def value_at(values: Any, path: Sequence[str]) -> Any:
    """The value in nested dicts and lists at the keys and indices in ``path``; UNSET if there is none."""
    for part in path:
        if isinstance(values, dict) and part in values:
            values = values[part]
        elif isinstance(values, list | tuple) and is_index(part) and int(part) < len(values):
            values = values[int(part)]
        else:
            return UNSET
    return values


def file_names(node: Node | None, key: str) -> list[Node]:
    """Return the file names in ``node`` as a list of nodes. ``node`` holds one file name or a list of file
    names. If ``node`` is None or holds null, the list is empty.

    Raises:
        ConfigError: ``node`` is anything else.
    """
    if node is None or node.value is None:
        return []
    items = node.value if isinstance(node.value, list) else [node]
    for item in items:
        if not isinstance(item.value, str) or not item.value:
            rule = "must be a file name or a list of file names"
            raise ConfigError(rule, key=key, value=plain_value(item), place=item.place)
    return items


def same_value(one: Node, other: Node) -> bool:
    """Whether two nodes have equal values. ``1`` equals ``1.0``, but ``true`` equals neither."""
    a, b = one.value, other.value
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(node, b[key]) for key, node in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_value, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def merge(base: Node, top: Node, path: str = "") -> Node:
    """Merge the tree ``top`` over ``base``. Values of ``top`` win; mappings are merged key by key.

    A mapping with ``_inherited_: False`` in ``top`` replaces the mapping in ``base`` as a whole.
    """
    if not isinstance(top.value, dict) or not isinstance(base.value, dict):
        return strip_marks(top)
    inherited = top.value.get("_inherited_")
    own = {key: node for key, node in top.value.items() if key != "_inherited_"}
    if inherited is not None:
        if not isinstance(inherited.value, bool):
            raise ConfigError(
                "must be true or false",
                key=f"{path}_inherited_",
                value=plain_value(inherited),
                place=inherited.place,
            )
        if not inherited.value:
            return strip_marks(Node(own, top.place))
    merged = dict(base.value)
    for key, node in own.items():
        merged[key] = merge(merged[key], node, f"{path}{key}.") if key in merged else strip_marks(node)
    return Node(merged, top.place)


def strip_marks(node: Node) -> Node:
    """Return ``node`` without the keys ``_inherited_``, which only affect merging."""
    if isinstance(node.value, dict):
        items = {key: strip_marks(child) for key, child in node.value.items() if key != "_inherited_"}
        return Node(items, node.place, node.text)
    return node
