"""A file merged over the files that its ``_base_`` names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.other_toolkits.fleetx import modernize
from ppfleetx.config.reading.files import MadeFile, Sections, shown_path
from ppfleetx.config.reading.parse import Budget, read_yaml
from ppfleetx.config.reading.tree import Node, merge, node_of, plain_value, strip_marks

MAX_CHAIN = 32
"""Files that name each other in a chain."""
MAX_FILES = 256
"""Files that are named in all, each as often as it is."""


def read_with_bases(path: Path | MadeFile | Sections) -> tuple[Node, tuple[str, ...]]:
    """The tree of ``path`` merged over its ``_base_`` files (the last of a list is strongest), and warnings.

    Old spellings are rewritten file by file, so that a file's old spelling replaces its base's new one.

    Raises:
        ConfigError: a file that cannot be read, files that form a circle, or more than a configuration needs.
    """
    reader = _Reader()
    if isinstance(path, Sections):
        return reader.merged(node_of(path.values, path.place), Path("config.yaml"), ())
    made = isinstance(path, MadeFile)
    found = reader.read(path.path, (), shown=path.place) if made else reader.read(path, ())
    return found.tree, found.warnings


@dataclass(frozen=True)
class _Found:
    """What a file and its bases say, and what reading them has counted."""

    tree: Node
    warnings: tuple[str, ...]
    values: int
    characters: int


class _Reader:
    """Reads each file once, however many others name it."""

    def __init__(self) -> None:
        self._found: dict[str, _Found] = {}
        self._budget = Budget()
        self._num_files = 0

    def read(self, path: Path, chain: tuple[tuple[str, Path], ...], **entry: Any) -> _Found:
        """The file ``path``.

        Args:
            chain: the files that lead here, each with its real path.
            entry: key, value and place of the ``_base_`` that names the file; or ``shown``, as of
                :func:`read_yaml`.
        """
        here = _real(path)
        if here in [real for real, _ in chain]:
            start = [real for real, _ in chain].index(here)
            circle = " -> ".join(p.name for p in (*(p for _, p in chain[start:]), path))
            raise ConfigError(
                f"_base_ files form a circle: {circle}", **(entry or {"place": shown_path(path)})
            )
        self._num_files += 1
        if len(chain) >= MAX_CHAIN or self._num_files > MAX_FILES:
            rule = f"files are named {MAX_CHAIN} deep here"
            if self._num_files > MAX_FILES:
                rule = f"_base_ names more than {MAX_FILES} files in all"
            raise ConfigError(f"{rule}, which no configuration needs", **entry)
        known = self._found.get(here)
        if known is not None:
            self._budget.take(known.values, known.characters, entry["place"])
            return known
        before = self._budget.values, self._budget.characters
        tree = read_yaml(path, self._budget, **entry)
        tree, warnings = self.merged(tree, path, (*chain, (here, path)))
        values, characters = self._budget.values - before[0], self._budget.characters - before[1]
        found = self._found[here] = _Found(tree, warnings, values, characters)
        return found

    def merged(
        self, tree: Node, path: Path, chain: tuple[tuple[str, Path], ...]
    ) -> tuple[Node, tuple[str, ...]]:
        """``tree``, which stands in ``path``, merged over its bases; ``chain``: the files that lead here."""
        base_node = tree.value.pop("_base_", None)
        tree, warnings = modernize(tree)
        merged: Node | None = None
        for item in _base_items(base_node):
            named = _tidy(path.parent / item.value)
            base = self.read(named, chain, key="_base_", value=item.value, place=item.place)
            warnings = tuple(dict.fromkeys((*base.warnings, *warnings)))
            merged = base.tree if merged is None else merge(merged, base.tree)
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
