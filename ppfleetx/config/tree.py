"""YAML text to a tree whose every value knows where it was written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ppfleetx.config.errors import ConfigError

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?\d+(_\d+)*")
_FLOAT = re.compile(
    r"[-+]?(\d+(_\d+)*\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?|[-+]?\.inf|\.nan", re.IGNORECASE
)
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL", "None"), None),
    **dict.fromkeys(("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"), False),
}
_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{kind}"
    for kind in ("str", "int", "float", "bool", "null", "timestamp", "value", "seq", "map")
}
_MAX_DEPTH = 40


@dataclass(slots=True)
class Node:
    """A value of the configuration: dict and list hold further nodes.

    ``text`` is a plain scalar as written, so that a text field gets ``007`` and ``off`` unchanged.
    """

    value: Any
    place: str
    text: str | None = None


def read_yaml(path: Path) -> Node:
    """The mapping in the file ``path``."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("there is no such file", place=str(path)) from None
    except IsADirectoryError:
        raise ConfigError("is a directory; give the YAML file itself", place=str(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not a text file in UTF-8 ({error.reason})", place=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", place=str(path)) from None
    node = parse_yaml(text, str(path), with_lines=True)
    if node is None:
        raise ConfigError("the file is empty; a configuration has sections such as Model", place=str(path))
    if not isinstance(node.value, dict):
        kind = "list" if isinstance(node.value, list) else "single value"
        raise ConfigError(f"the file holds a {kind}; sections such as `Model:` are needed", place=node.place)
    return node


def parse_yaml(text: str, place: str, *, with_lines: bool = False) -> Node | None:
    """Parse one YAML document; None when it is empty. Only YAML's own plain types are built."""
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place}:{mark.line + 1}" if with_lines and mark else place
        problem = getattr(error, "problem", None) or "cannot be read"
        raise ConfigError(f"is not valid YAML: {problem}", place=where) from None
    except UnicodeEncodeError as error:  # bytes of a command line that are no UTF-8
        problem = f"character {error.start} is no Unicode text"
        raise ConfigError(f"is not valid YAML: {problem}", place=place) from None
    if root is None:
        return None
    return _convert(root, place, with_lines, depth=0)


def _convert(node: yaml.Node, file: str, with_lines: bool, depth: int) -> Node:
    place = f"{file}:{node.start_mark.line + 1}" if with_lines else file
    if depth > _MAX_DEPTH:
        raise ConfigError("is nested too deeply, or an alias refers to what contains it", place=place)
    if node.tag not in _PLAIN_TAGS:
        raise ConfigError(f"the tag {node.tag} is not allowed; write plain values", place=place)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, place)
    if isinstance(node, yaml.SequenceNode):
        return Node([_convert(item, file, with_lines, depth + 1) for item in node.value], place)
    content: dict[str, Node] = {}
    for key_node, value_node in node.value:
        at = f"{file}:{key_node.start_mark.line + 1}" if with_lines else file
        key = key_node.value
        if not isinstance(key, str) or key_node.tag == "tag:yaml.org,2002:merge":
            raise ConfigError("a key must be a plain word", key=str(key)[:40], place=at)
        if key in content:
            raise ConfigError(
                f"is given twice in this mapping (first in {content[key].place})", key=key, place=at
            )
        content[key] = _convert(value_node, file, with_lines, depth + 1)
        content[key].place = at
    return Node(content, place)


def _scalar(node: yaml.ScalarNode, place: str) -> Node:
    if node.style:  # quoted or block: a text; the C loader says '' for plain, the Python one None
        return Node(node.value, place)
    return Node(plain_scalar(node.value), place, node.value)


def plain_scalar(text: str) -> Any:
    """Value of an unquoted scalar. Not as YAML 1.1: ``2e-5`` is a number, ``None`` null, ``1:30`` a text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    return text


def merge(base: Node, top: Node) -> Node:
    """``top`` over ``base``: mappings merge key by key, everything else replaces.

    ``_inherited_: False`` in a mapping of ``top`` drops what the base has there.
    """
    if not isinstance(top.value, dict) or not isinstance(base.value, dict):
        return strip_marks(top)
    inherited = top.value.get("_inherited_")
    own = {key: node for key, node in top.value.items() if key != "_inherited_"}
    if inherited is not None:
        if not isinstance(inherited.value, bool):
            raise ConfigError(
                "must be true or false", key="_inherited_", value=inherited.value, place=inherited.place
            )
        if not inherited.value:
            return strip_marks(Node(own, top.place))
    merged = dict(base.value)
    for key, node in own.items():
        merged[key] = merge(merged[key], node) if key in merged else strip_marks(node)
    return Node(merged, top.place)


def strip_marks(node: Node) -> Node:
    """``node`` without ``_inherited_`` keys, which have no meaning where there is nothing to inherit."""
    if isinstance(node.value, dict):
        items = {key: strip_marks(child) for key, child in node.value.items() if key != "_inherited_"}
        return Node(items, node.place, node.text)
    return node
