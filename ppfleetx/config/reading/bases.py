"""A file merged over the files that its ``_base_`` names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.other_toolkits.fleetx import modernize
from ppfleetx.config.reading.files import MadeFile, Sections
from ppfleetx.config.reading.parse import read_yaml
from ppfleetx.config.reading.tree import Node, merge, node_of, plain_value, strip_marks


def read_with_bases(path: Path | MadeFile | Sections) -> tuple[Node, tuple[str, ...]]:
    """The tree of ``path`` merged over its ``_base_`` files (the last of a list is strongest), and warnings.

    Old spellings are rewritten file by file, so that a file's old spelling replaces its base's new one.

    Raises:
        ConfigError: a file cannot be read, or the files form a circle.
    """
    if isinstance(path, Sections):
        return _over_bases(node_of(path.values, path.place), (Path("config.yaml"),))
    if isinstance(path, MadeFile):
        return _read(path.path, (), shown=path.place)
    return _read(path, ())


def _read(path: Path, chain: tuple[Path, ...], **entry: Any) -> tuple[Node, tuple[str, ...]]:
    """The file ``path`` over its bases.

    Args:
        chain: the files that lead here.
        entry: key, value and place of the ``_base_`` that names the file; or ``shown``. See
            :func:`read_yaml`.
    """
    real = [_real(one) for one in chain]
    if _real(path) in real:
        circle = " -> ".join(one.name for one in (*chain[real.index(_real(path)) :], path))
        raise ConfigError(f"_base_ files form a circle: {circle}", **entry)
    return _over_bases(read_yaml(path, **entry), (*chain, path))


def _over_bases(tree: Node, chain: tuple[Path, ...]) -> tuple[Node, tuple[str, ...]]:
    """``tree``, which stands in the last file of ``chain``, over the files that its ``_base_`` names."""
    base_node = tree.value.pop("_base_", None)
    tree, warnings = modernize(tree)
    merged: Node | None = None
    for item in _base_items(base_node):
        named = _tidy(chain[-1].parent / item.value)
        base, more = _read(named, chain, key="_base_", value=item.value, place=item.place)
        warnings = tuple(dict.fromkeys((*more, *warnings)))
        merged = base if merged is None else merge(merged, base)
    return (strip_marks(tree) if merged is None else merge(merged, tree)), warnings


def _real(path: Path) -> str:
    """Where ``path`` leads; the path itself where nothing can be there."""
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):
        return os.fspath(path)


def _tidy(path: Path) -> Path:
    """``path`` without ``..``, where that leads to the same file: messages show it."""
    plain = Path(os.path.normpath(path))
    return plain if _real(plain) == _real(path) else path


def _base_items(node: Node | None) -> list[Node]:
    if node is None or node.value is None:
        return []
    items = node.value if isinstance(node.value, list) else [node]
    for item in items:
        if not isinstance(item.value, str):
            raise ConfigError(
                "must be a file name or a list of file names",
                key="_base_",
                value=plain_value(item),
                place=item.place,
            )
    return items
