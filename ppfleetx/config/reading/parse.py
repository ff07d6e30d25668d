"""Parse YAML files into trees of nodes that record the file and line of each value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ppfleetx.config.errors import UNSET, ConfigError, shown
from ppfleetx.config.reading.tree import Node, plain_scalar, plain_value, same_value

MAX_FILE_BYTES = 1 << 20
"""The size of the largest accepted file. A resolved configuration with every key has about 10,000 bytes."""

_MAX_SHOWN = 400
_OF_A_MODEL = "the model in "


@dataclass(frozen=True)
class Sections:
    """A configuration given as nested sections instead of a file.

    Attributes:
        place: where the values come from, for messages.
    """

    values: Mapping[str, Any]
    place: str


def model_in(directory: str | Path) -> str:
    """Return the string ``the model in DIR``, which messages show as the origin of values that were read from
    a model's directory."""
    return f"{_OF_A_MODEL}{shown_path(Path(directory))}"


def is_of_a_model(place: str) -> bool:
    """Whether the string ``place`` has the form ``the model in DIR``, which :func:`model_in` returns."""
    return place.startswith(_OF_A_MODEL)


def read_text(path: Path, *, key: str | None = None, value: str = UNSET, place: str | None = None) -> str:
    """Read the UTF-8 text of a configuration file.

    Args:
        key, value, place: the configuration entry that names the file, for messages.

    Raises:
        ConfigError: the file cannot be read, is too large or is not UTF-8.
    """
    entry = {"place": shown_path(path)} if key is None else {"key": key, "value": value, "place": place}
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"is larger than {MAX_FILE_BYTES:,} bytes, too large for a configuration", **entry
            )
        content = path.read_bytes()
    except IsADirectoryError:
        what = "is a directory" if key else "is a directory without a config.yaml"
        raise ConfigError(f"{what}; name the file in it", **entry) from None
    except FileNotFoundError:
        raise ConfigError("there is no such file", **entry) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", **entry) from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        rule = f"is not a text file in UTF-8 ({error.reason})"
        if content.startswith((b"\xff\xfe", b"\xfe\xff")):
            rule = "is UTF-16; save it as UTF-8"
        raise ConfigError(rule, place=f"{shown_path(path)}:{line}") from None


def shown_path(path: Path) -> str:
    """Format ``path`` for messages, escaped if it is not printable, and cut if it is too long."""
    text = str(path)
    return text if text.isprintable() and len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]!r}"


@cache
def shipped_yaml(path: Path) -> Any:
    """Load a YAML file of this package. The result is cached, so callers must not change it."""
    # PyYAML's pure-Python parser would take a tenth of a program's start-up time.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text("utf-8"), loader)  # noqa: S506 - both loaders are safe


_PLAIN = "plain"  # the tag of an unquoted scalar without an explicit tag
_TAG = "tag:yaml.org,2002:"
_TEXT_TAG = f"{_TAG}str"
_TAGS = {_PLAIN, _TEXT_TAG, *(f"{_TAG}{kind}" for kind in ("int", "float", "bool", "null", "seq", "map"))}


def read_yaml(
    path: Path,
    *,
    key: str | None = None,
    value: str = UNSET,
    place: str | None = None,
    is_ours: bool = True,
) -> Node:
    """Read a YAML file that contains a mapping, and return it as a tree of nodes.

    Args:
        key, value, place: the configuration entry that names the file, for messages.
        is_ours: False for files of other toolkits. In these, keys may contain dots or be repeated with an
            equal value, and ``<<`` is accepted.

    Raises:
        ConfigError: the file cannot be read, or does not contain a mapping.
    """
    text = read_text(path, key=key, value=value, place=place)
    node = parse_yaml(text, shown_path(path), with_lines=True, is_ours=is_ours)
    if node is None:
        raise ConfigError(
            "the file is empty; a configuration has sections such as Model", place=shown_path(path)
        )
    if not isinstance(node.value, dict):
        kind = "list" if isinstance(node.value, list) else "single value"
        raise ConfigError(f"the file holds a {kind}; sections such as `Model:` are needed", place=node.place)
    return node


def made_sections(path: Path, place: str) -> Sections:
    """Read the sections in a YAML file that ppfleetx generated.

    Error messages do not name the file, which the user has never seen. They name its source, ``place``.
    """
    return Sections(plain_value(read_yaml(path)), place)


def parse_yaml(text: str, place: str, *, with_lines: bool = False, is_ours: bool = True) -> Node | None:
    """Parse one YAML document into a tree of nodes. Returns None for an empty document.

    Args:
        place: the file or option that ``text`` comes from, for messages.
        with_lines: whether the ``place`` of each node includes a line number.
        is_ours: False for files of other toolkits. In these, keys may contain dots or be repeated with an
            equal value, and ``<<`` is accepted.

    Raises:
        ConfigError: ``text`` is not valid YAML, or has tags or keys that a configuration must not have.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
        return None if root is None else _Tree(place, with_lines, is_ours).node(root, ())
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"is not valid YAML: {error.reason}", place=f"{place}:{line}" if with_lines else place
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise ConfigError(
            f"is not valid YAML: {error.problem}",
            place=f"{place}:{mark.line + 1}" if with_lines and mark else place,
        ) from None
    except RecursionError:
        raise ConfigError("is nested too deeply", place=place) from None


class _Loader(yaml.SafeLoader):
    """A YAML loader that keeps unquoted scalars as strings, which :func:`plain_scalar` parses later."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        is_plain = kind is yaml.ScalarNode and implicit[0]
        return _PLAIN if is_plain else super().resolve(kind, value, implicit)


class _Tree:
    """Converts PyYAML's nodes to :class:`Node` objects, which record the file and line of each value."""

    def __init__(self, place: str, with_lines: bool, is_ours: bool) -> None:
        self._place, self._with_lines, self._is_ours = place, with_lines, is_ours

    def node(self, node: yaml.Node, path: tuple[str, ...]) -> Node:
        """Convert a PyYAML node and its descendants. ``path`` is the list of keys and indices to the node."""
        where = self._where(node)
        if node.tag not in _TAGS:
            _refuse(f"the tag {shown(node.tag)} is not allowed; write plain values", path, where)
        if isinstance(node, yaml.MappingNode):
            return Node(self._mapping(node, path), where)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.node(item, (*path, str(at))) for at, item in enumerate(node.value)], where)
        if node.tag == _TEXT_TAG:  # quoted, a block, or tagged as text
            return Node(node.value, where)
        return Node(plain_scalar(node.value), where, node.value)

    def _mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Node]:
        found: dict[str, Node] = {}
        merged: list[Node] = []
        for key_node, value_node in node.value:
            place = self._where(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                _refuse("a key must be a plain word, not a list or a mapping", path, place)
            key = key_node.value
            here = (*path, key)
            if problem := key_problem(key, is_ours=self._is_ours):
                _refuse(problem, here, place)
            value = self.node(value_node, here)
            value.place = place
            if key == "<<":
                merged += value.value if isinstance(value.value, list) else [value]
                continue
            if key in found and (self._is_ours or not same_value(found[key], value)):
                _refuse(f"is given twice in this mapping (first in {found[key].place})", here, place)
            found[key] = value
        for one in merged:  # the mapping's own keys win, then the first merged mapping with the key
            if not isinstance(one.value, dict):
                _refuse("must name a mapping, or a list of them", (*path, "<<"), one.place)
            for key, value in one.value.items():
                found.setdefault(key, value)
        return found

    def _where(self, node: yaml.Node) -> str:
        return f"{self._place}:{node.start_mark.line + 1}" if self._with_lines else self._place


def _refuse(rule: str, path: tuple[str, ...], place: str) -> NoReturn:
    raise ConfigError(rule, key=".".join(path) or None, place=place)


def key_problem(key: str, *, is_ours: bool = True) -> str | None:
    """Return the reason why ``key`` is not allowed as a key in a mapping; None if it is allowed."""
    if not key.strip():
        return "a key must be a plain word, and this one is empty"
    if is_ours and key == "<<":
        return "merge keys are not supported; name files in _base_, or write the values out"
    if is_ours and "." in key:
        return "dots stand between keys with -o; in a file, nest the keys"
    return None
