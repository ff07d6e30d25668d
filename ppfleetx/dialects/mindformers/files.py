"""A MindFormers configuration: a file over the files of its ``base_config``, then flags and ``--options``."""

from __future__ import annotations

import os
from pathlib import Path

from ppfleetx.config.errors import ConfigError, shown
from ppfleetx.config.reading.parse import key_problem, parse_yaml, read_yaml
from ppfleetx.config.reading.tree import Node, is_index, merge, plain_value


def read_with_bases(path: Path, chain: tuple[str, ...] = (), **entry: str) -> Node:
    """The tree of ``path`` over its bases.

    Of several bases that hold the same top-level block, the last one's replaces the others' whole; the file
    itself is merged over that key by key (MindFormers v0.3 does both so).

    Args:
        chain: real paths of the files that lead here.
        entry: key, value and place of the ``base_config`` that names the file.

    Raises:
        ConfigError: a file cannot be read, or the files form a circle.
    """
    here = os.path.realpath(path) if "\0" not in str(path) else str(path)
    if here in chain:
        raise ConfigError("the files form a circle", **entry)
    tree = read_yaml(path, is_ours=False, **entry)
    bases = tree.value.pop("base_config", None)
    below = Node({}, tree.place)
    for item in _items(bases):
        about = {"key": "base_config", "value": item.value, "place": item.place}
        base = read_with_bases(path.parent / item.value, (*chain, here), **about)
        below.value.update(base.value)
    return merge(below, tree)


def _items(bases: Node | None) -> list[Node]:
    if bases is None or bases.value is None:
        return []
    items = bases.value if isinstance(bases.value, list) else [bases]
    for item in items:
        if not isinstance(item.value, str) or not item.value:
            raise ConfigError(
                "must be a file name or a list of file names",
                key="base_config",
                value=plain_value(item),
                place=item.place,
            )
    return items


def option(text: str, place: str) -> tuple[list[str], Node]:
    """Key and value of one ``a.b=c`` of ``--options``; the value is read as YAML reads it.

    Raises:
        ConfigError: it has another form.
    """
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    problem = next(filter(None, map(key_problem, path)), None)
    if not equals or problem:
        rule = problem or f"{shown(text)} is not of the form block.key=value"
        raise ConfigError(rule, key="--options", place=place)
    try:
        node = parse_yaml(_list_of(value.strip()), place)
    except ConfigError as error:
        raise ConfigError(f"the value {error.rule}", key=key.strip(), value=value, place=place) from None
    return path, node or Node(None, place, "")


def _list_of(value: str) -> str:
    """``(1,2)`` is a list too, as MindFormers writes tuples."""
    return f"[{value[1:-1]}]" if value.startswith("(") and value.endswith(")") else value


def put(tree: Node, path: list[str], node: Node) -> None:
    """Put ``node`` where ``path`` leads in ``tree``; mappings that are missing on the way are made.

    Raises:
        ConfigError: the path leads into a list that has no such item, or through a single value.
    """
    key = ".".join(path)
    for depth, part in enumerate(path):
        is_last = depth == len(path) - 1
        if isinstance(tree.value, list):
            if not is_index(part) or int(part) >= len(tree.value):
                rule = f"{shown(part)} is no item of a list of {len(tree.value)}, counted from 0"
                raise ConfigError(rule, key=key, place=node.place)
            if is_last:
                tree.value[int(part)] = node
            else:
                tree = tree.value[int(part)]
            continue
        if tree.value is None:
            tree.value, tree.text = {}, None
        if not isinstance(tree.value, dict):
            rule = f"{'.'.join(path[:depth])} is a single value ({tree.place}), no block"
            raise ConfigError(rule, key=key, place=node.place)
        if is_last:
            tree.value[part] = node
        else:
            tree = tree.value.setdefault(part, Node({}, node.place))
