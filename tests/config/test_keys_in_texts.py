"""Messages name keys of the configuration; the keys they name are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_args

from ppfleetx.config.section import Section
from ppfleetx.config.sections.root import RunConfig

PACKAGE = Path(__file__).resolve().parents[2] / "ppfleetx"
KEY = re.compile(rf"\b(?:{'|'.join(RunConfig.model_fields)})(?:\.[A-Za-z_*][A-Za-z_0-9*]*)+\b(?!\()")
# Their tables are of other programs' keys.
OTHERS = ("config/fleetx_keys.py", "config/loader.py", "dialects/")
NO_KEYS = {
    "Generation.KEY": "stands for any",
}


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of each string; what an f-string computes is a ``*``."""
    parts: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in ast.walk(node) if part is not node}
            values = [part.value if isinstance(part, ast.Constant) else "*" for part in node.values]
            yield node.lineno, "".join(values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_in(argument)


def is_key(key: str) -> bool:
    """Whether the configuration has this key; ``*`` stands for any, and for an item of a list."""
    sections: list[type[Section]] = [RunConfig]
    for word in key.split("."):
        fields = [
            field
            for section in sections
            for name, field in section.model_fields.items()
            if fnmatch(name, word)
        ]
        if not fields:
            return not sections or word == "*"  # below a value of its own: a dictionary, a list
        sections = [section for field in fields for section in sections_in(field.annotation)]
    return True


def test_every_key_that_a_text_names_is_a_key():
    wrong, found = [], 0
    for file in PACKAGE.rglob("*.py"):
        place = file.relative_to(PACKAGE).as_posix()
        if place.startswith(OTHERS):
            continue
        for line, text in texts(ast.parse(file.read_text(encoding="utf-8"))):
            for key in KEY.findall(text):
                found += 1
                if not is_key(key) and key not in NO_KEYS:
                    wrong.append(f"{place}:{line}: {key}")
    assert wrong == []
    assert found > 300
