"""The keys of a dialect and what becomes of each, for translation, messages and documentation."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ppfleetx.config.errors import shown_key

Convert = Callable[[Any], Mapping[str, Any] | Any]
"""From the value of a key to native values: a mapping of native keys, or the one value of ``Key.to``."""


class Kind(StrEnum):
    """What happens to a key."""

    MAPPED = "mapped"
    FIXED = "fixed"
    UNUSED = "without meaning"
    REFUSED = "refused"


@dataclass(frozen=True)
class Key:
    """One key of a dialect.

    Attributes:
        name: dotted; ``*`` stands for any one part, a last ``**`` for any one or more parts.
        kind: what happens to it.
        to: native keys that it decides, alone or together with others.
        convert: how; None with ``to``: a rule of the dialect reads the key together with others.
        accepts: of a fixed key, the values that it may have; None: any.
        says: the conversion, the reason, or what to do instead, as a sentence without its full stop.
    """

    name: str
    kind: Kind
    to: tuple[str, ...] = ()
    convert: Convert | None = None
    accepts: tuple[Any, ...] | None = None
    says: str = ""


def same(value: Any) -> Any:
    """The value as it is."""
    return value


class KeyTable:
    """The keys of a dialect, found by the names that its users write.

    Args:
        keys: in the order of the documentation.
        normal: how a written name is brought to that of the table.
    """

    def __init__(self, keys: Iterable[Key], normal: Callable[[str], str] = same) -> None:
        self.keys = tuple(keys)
        self._normal = normal
        self._exact = {key.name: key for key in self.keys}
        self._patterns = [(key.name.split("."), key) for key in self.keys if "*" in key.name]
        if len(self._exact) != len(self.keys):
            raise ValueError("a key stands twice in the table")

    def find(self, name: str) -> Key | None:
        """The key that ``name`` names; an exact one before a pattern."""
        name = self._normal(name)
        if name in self._exact:
            return self._exact[name]
        parts = name.split(".")
        return next((key for pattern, key in self._patterns if _matches(pattern, parts)), None)

    def is_block(self, name: str) -> bool:
        """Whether ``name`` is a mapping that holds keys of the table."""
        prefix = f"{self._normal(name)}."
        parts = prefix.split(".")[:-1]
        return any(key.name.startswith(prefix) for key in self.keys) or any(
            len(pattern) > len(parts) and _matches(pattern[: len(parts)], parts)
            for pattern, _ in self._patterns
        )

    def nearest(self, name: str) -> str:
        """A sentence with the keys that the writer of an unknown key may have meant."""
        name = self._normal(name)
        known = [key.name for key in self.keys if not key.name.endswith("**")]
        last = name.rpartition(".")[2]
        near = [one for one in known if one.rpartition(".")[2] == last]
        near += difflib.get_close_matches(name, known, n=2, cutoff=0.7)
        if not near:
            lasts = {one.rpartition(".")[2]: one for one in known}
            near = [lasts[one] for one in difflib.get_close_matches(last, lasts, n=2, cutoff=0.7)]
        near = list(dict.fromkeys(near))[:3]
        if near:
            return f"Did you mean {' or '.join(near)}?"
        return f"The page of this dialect lists all keys; {shown_key(name)} resembles none."


def _matches(pattern: list[str], parts: list[str]) -> bool:
    if pattern and pattern[-1] == "**":
        head = pattern[:-1]
        return len(parts) > len(head) and _matches(head, parts[: len(head)])
    return len(pattern) == len(parts) and all(
        p in ("*", part) for p, part in zip(pattern, parts, strict=True)
    )
