"""YAML text to a tree of nodes, in time and memory that the size of the text bounds.

The parser's events are read one by one and the tree is built here: PyYAML's own composer recurses for each
bracket, and repeats for each alias what the anchor holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ppfleetx.config.errors import UNSET, ConfigError, shown, shown_key
from ppfleetx.config.other_toolkits.foreign import refuse_foreign_text
from ppfleetx.config.reading.files import MAX_FILE_BYTES, read_text, shown_path
from ppfleetx.config.reading.tree import Node, plain_scalar, same_value

MAX_DEPTH = 40
"""Mappings and lists within each other."""
MAX_VALUES = 20_000
"""Values of all files together, and of all overrides; a resolved configuration has about 300."""
MAX_CHARACTERS = MAX_FILE_BYTES
"""Characters of their texts."""
MAX_KEY = 100
"""Characters of one key."""
_MAX_DIRECTIVES = 10  # the parser compares each with all before it

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_TEXT_TAGS = ("!", f"{_TAG}str")
_PLAIN_TAGS = {f"{_TAG}{kind}" for kind in ("int", "float", "bool", "null", "timestamp", "seq", "map")}
_DIRECTIVE = re.compile(r"^%", re.MULTILINE)


@dataclass(slots=True)
class Budget:
    """What has been read so far. What an alias repeats counts each time, and so does a base."""

    values: int = 0
    characters: int = 0

    def take(self, values: int, characters: int, place: str) -> None:
        """Count more, and raise where it is more than any configuration needs."""
        self.values += values
        self.characters += characters
        if self.values > MAX_VALUES:
            raise ConfigError(
                f"here are more than {MAX_VALUES:,} values, which no configuration needs", place=place
            )
        if self.characters > MAX_CHARACTERS:
            raise ConfigError(
                f"here are more than {MAX_CHARACTERS:,} characters, which no configuration needs", place=place
            )


def read_yaml(
    path: Path,
    budget: Budget,
    *,
    key: str | None = None,
    value: str = UNSET,
    place: str | None = None,
    shown: str | None = None,
    is_ours: bool = True,
) -> Node:
    """The mapping in the file ``path``.

    Key, value and place are as in :func:`ppfleetx.config.reading.files.read_text`.

    Args:
        shown: the place of all nodes, instead of the file and its lines.
        is_ours: the file should be a configuration of this program: one of another toolkit is named as such.

    Raises:
        ConfigError: the file cannot be read, is no YAML, has no mapping, or is larger than any configuration.
    """
    text = read_text(path, key=key, value=value, place=place)
    try:
        node = parse_yaml(text, shown or shown_path(path), budget, with_lines=shown is None, is_ours=is_ours)
    except ConfigError:
        if is_ours:
            refuse_foreign_text(text, shown_path(path))
        raise
    if node is None:
        raise ConfigError(
            "the file is empty; a configuration has sections such as Model", place=shown_path(path)
        )
    if not isinstance(node.value, dict):
        if is_ours:
            refuse_foreign_text(text, shown_path(path))
        kind = "list" if isinstance(node.value, list) else "single value"
        raise ConfigError(f"the file holds a {kind}; sections such as `Model:` are needed", place=node.place)
    return node


def parse_yaml(
    text: str, place: str, budget: Budget, *, with_lines: bool = False, is_ours: bool = True
) -> Node | None:
    """Parse one YAML document; None when it is empty. Only YAML's own plain types are built.

    Args:
        text: the document.
        place: the file, or what else the text came from, for messages and for the nodes.
        budget: counts what is read.
        with_lines: whether places get the number of the line.
        is_ours: it follows the rules of this program's files. In those of other toolkits a key may hold dots
            or be repeated with an equal value, and ``<<`` merges mappings.

    Raises:
        ConfigError: the text is not one plain YAML document, or is larger than ``budget`` allows.
    """
    if len(_DIRECTIVE.findall(text)) > _MAX_DIRECTIVES:
        raise ConfigError(f"has more than {_MAX_DIRECTIVES} lines that begin with %", place=place)
    builder = _Builder(place, budget, with_lines, is_ours)
    try:
        for event in yaml.parse(text, Loader=_Loader):
            builder.take(event)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        where = f"{place}:{line}" if with_lines else place
        raise ConfigError(f"is not valid YAML: {error.reason}", place=where) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place}:{mark.line + 1}" if with_lines and mark else place
        problem = getattr(error, "problem", None) or "cannot be read"
        raise ConfigError(f"is not valid YAML: {problem}", place=where) from None
    except UnicodeEncodeError as error:  # bytes of a command line that are no UTF-8
        problem = f"character {error.start} is not Unicode text"
        raise ConfigError(f"is not valid YAML: {problem}", place=place) from None
    return builder.root


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end has not come yet; of a mapping, the key whose value comes next.

    ``name`` is its own key or index in what it is part of; ``merged`` came by ``<<``, and its own keys win.
    """

    node: Node
    anchor: str | None
    name: str | None
    key: str | None = None
    key_place: str = ""
    merged: list[tuple[Node, str]] = field(default_factory=list)


class _Builder:
    """Makes nodes of events, and raises where a document is more than a configuration can be."""

    def __init__(self, place: str, budget: Budget, with_lines: bool, is_ours: bool) -> None:
        self.root: Node | None = None
        self._place, self._budget, self._with_lines, self._is_ours = place, budget, with_lines, is_ours
        self._open: list[_Open] = []
        self._anchors: dict[str, Node] = {}
        self._documents = 0

    def take(self, event: yaml.Event) -> None:
        """The next event of the document."""
        where = f"{self._place}:{event.start_mark.line + 1}" if self._with_lines else self._place
        if isinstance(event, yaml.ScalarEvent):
            self._add(self._scalar(event, where), event.anchor)
        elif isinstance(event, yaml.AliasEvent):
            self._add(self._repeated(event.anchor, where), None)
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            self._begin(event, where)
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            self._merge(self._open[-1])
            ended = self._open.pop()
            if ended.anchor is not None:
                self._anchors[ended.anchor] = ended.node
        elif isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise ConfigError("a second document begins here; a configuration is one", place=where)

    def _begin(self, event: yaml.CollectionStartEvent, where: str) -> None:
        self._check_tag(event.tag, where)
        if self._expects_key():
            self._refuse("a key must be a plain word, not a list or a mapping", where)
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        node = Node({} if is_mapping else [], where)
        self._anchors.pop(event.anchor, None)
        name = self._next_name()
        self._add(node, None)
        self._open.append(_Open(node, event.anchor, name))
        if len(self._open) > MAX_DEPTH:
            self._refuse(f"is nested too deeply: {MAX_DEPTH} levels are enough for any configuration", where)

    def _scalar(self, event: yaml.ScalarEvent, where: str) -> Node:
        self._check_tag(event.tag, where)
        if "\0" in event.value:
            self._refuse("holds the character NUL, which is not allowed here", where)
        if event.style or event.tag in _TEXT_TAGS:  # quoted, block or said to be a text
            return Node(event.value, where)
        return Node(plain_scalar(event.value), where, event.value)

    def _check_tag(self, tag: str | None, where: str) -> None:
        if tag is not None and tag not in _PLAIN_TAGS and tag not in _TEXT_TAGS:
            self._refuse(f"the tag {shown(tag)} is not allowed; write plain values", where)

    def _repeated(self, anchor: str, where: str) -> Node:
        node = self._anchors.get(anchor)
        if node is None:
            circle = any(one.anchor == anchor for one in self._open)
            why = "is part of what it refers to" if circle else "refers to nothing before it"
            self._refuse(f"the alias *{shown_key(anchor)} {why}", where)
        return Node(self._copy(node, len(self._open), where).value, where, node.text)

    def _copy(self, node: Node, depth: int, where: str) -> Node:
        """``node`` again, each value counted."""
        if depth > MAX_DEPTH:
            self._refuse("is nested too deeply, through aliases", where)
        if isinstance(node.value, dict):
            items = {key: self._copy_item(child, depth, where) for key, child in node.value.items()}
            return Node(items, node.place)
        if isinstance(node.value, list):
            return Node([self._copy_item(child, depth, where) for child in node.value], node.place)
        return Node(node.value, node.place, node.text)

    def _copy_item(self, node: Node, depth: int, where: str) -> Node:
        self._count(node, where)
        return self._copy(node, depth + 1, where)

    def _count(self, node: Node, where: str) -> None:
        text = node.value if node.text is None else node.text
        self._budget.take(1, len(text) if isinstance(text, str) else 0, where)

    def _next_name(self) -> str | None:
        """Key or index of what comes next in the innermost mapping or list."""
        if not self._open:
            return None
        inner = self._open[-1]
        return str(len(inner.node.value)) if isinstance(inner.node.value, list) else inner.key

    def _expects_key(self) -> bool:
        return bool(self._open) and self._open[-1].key is None and isinstance(self._open[-1].node.value, dict)

    def _add(self, node: Node, anchor: str | None) -> None:
        """Put ``node`` where it belongs: a key, a value, an item, or the whole document."""
        if anchor is not None:
            self._anchors[anchor] = node
        if self._expects_key():
            self._take_key(node)
            return
        self._count(node, node.place)
        if not self._open:
            self.root = node
            return
        inner = self._open[-1]
        if isinstance(inner.node.value, list):
            inner.node.value.append(node)
            return
        if inner.key == "<<":
            inner.merged.append((node, inner.key_place))
        else:
            earlier = inner.node.value.get(inner.key)
            if earlier is not None and (self._is_ours or not same_value(earlier, node)):
                rule = f"is given twice in this mapping (first in {earlier.place})"
                self._refuse(rule, inner.key_place, inner.key)
            inner.node.value[inner.key] = node
            node.place = inner.key_place
        inner.key = None

    def _merge(self, ended: _Open) -> None:
        """Take what ``<<`` names where the mapping has no key of its own: of several the first wins."""
        for named, place in ended.merged:
            for one in named.value if isinstance(named.value, list) else [named]:
                if not isinstance(one.value, dict):
                    self._refuse("must name a mapping, or a list of them", place, "<<")
                for key, node in one.value.items():
                    ended.node.value.setdefault(key, node)

    def _take_key(self, node: Node) -> None:
        key = node.value if node.text is None else node.text
        if not isinstance(key, str):
            self._refuse("a key must be a plain word, not a list or a mapping", node.place)
        if problem := key_problem(key, is_ours=self._is_ours):
            self._refuse(problem, node.place, key)
        inner = self._open[-1]
        inner.key, inner.key_place = key, node.place

    def _refuse(self, rule: str, where: str, key: str | None = None) -> None:
        parts = [*(one.name for one in self._open), self._next_name() if key is None else key]
        path = [part for part in parts if part is not None]
        raise ConfigError(rule, key=".".join(path) if path else None, place=where)


def key_problem(key: str, *, is_ours: bool = True) -> str | None:
    """Why ``key`` cannot be a key of a mapping; None when it can."""
    if is_ours and key == "<<":
        return "merge keys are not read; name files in _base_, or write the values out"
    if not key.strip():
        return "a key must be a plain word, and this one is empty"
    if len(key) > MAX_KEY:
        return f"a key must be a plain word; this one has {len(key):,} characters"
    if not key.isprintable():
        return "a key must be a plain word; this one holds control characters"
    if is_ours and "." in key:
        return "dots stand between keys with -o; in a file, the keys are written below each other"
    return None
