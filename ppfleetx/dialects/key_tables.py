"""Key tables, which say how ppfleetx translates each option of another toolkit. A table is read from the
toolkit's ``keys.yaml``.

Each row names one option, or several separated by spaces, under ``key``, and has one of these fields:

- ``to``: the keys of ppfleetx that get the option's value. ``choices`` maps the option's values to values of
  ppfleetx; ``by`` names a function in `CONVERSIONS` instead. Without both, the value is unchanged.
  ``default`` is the value to use if no option of the row is given.
- ``joint``: the keys of ppfleetx that a rule, a Python function, computes from this option and others.
- ``fixed``: why the option has no effect, for example because ppfleetx always computes the loss in float32.
  ``only`` lists the accepted values; other values are an error.
- ``unused``: why the option has no meaning in ppfleetx, for example because it is an internal of the other
  toolkit. All values are accepted.
- ``refused``: why the option is an error.

``says`` is a note for the documentation page. In an option's dotted name, ``*`` matches one part, and ``**``
at the end matches one or more parts.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ppfleetx.config.errors import shown, shown_key
from ppfleetx.config.reading.parse import shipped_yaml

Convert = Callable[[Any], Mapping[str, Any] | Any]
"""A function that converts an option's value. It returns ``{key of ppfleetx: value}``, or one value for all
keys in ``Key.to``."""


class Kind(StrEnum):
    MAPPED = "mapped"
    FIXED = "fixed"
    UNUSED = "without meaning"
    REFUSED = "refused"


@dataclass(frozen=True)
class Key:
    """One option of another toolkit, and how it is translated.

    Attributes:
        name: the option's dotted name, which can contain ``*`` and ``**``.
        kind: whether the option is translated, has no effect, has no meaning, or is refused.
        to: the keys of ppfleetx that the option sets.
        convert: converts the option's value; None if a rule does that, or if the option is not translated.
        accepts: the values that are allowed for an option without effect; None: any value.
        default: the value to use if the option is not given.
        says: an explanation, without a final period: how the value is converted, why the option has no effect
            or meaning, or what to do instead.
    """

    name: str
    kind: Kind
    to: tuple[str, ...] = ()
    convert: Convert | None = None
    accepts: tuple[Any, ...] | None = None
    says: str = ""
    default: Any = None

    def convert_value(self, value: Any) -> Mapping[str, Any]:
        """Convert the option's ``value`` to ``{key of ppfleetx: value}``. A converted value of None means
        that the key stays unset. Raises ValueError if the option cannot have this value."""
        found = self.convert(value)
        return found if isinstance(found, Mapping) else dict.fromkeys(self.to, found)


def same(value: Any) -> Any:
    return value


class KeyTable:
    """The options of another toolkit that ppfleetx knows, in the order of the documentation page.

    ``normal`` converts a name as users write it (``--num-layers``) to the name in the table (``num_layers``).
    """

    def __init__(self, keys: Iterable[Key], normal: Callable[[str], str] = same) -> None:
        self.keys = tuple(keys)
        self._normal = normal
        self._exact = {key.name: key for key in self.keys}
        self._patterns = [(_pattern(key.name), key) for key in self.keys if "*" in key.name]
        assert len(self._exact) == len(self.keys), "a key occurs twice in the table"

    def find(self, name: str) -> Key | None:
        """Return the option with this name; None if it is unknown. An exact name takes precedence over a
        ``*`` pattern."""
        name = self._normal(name)
        if name in self._exact:
            return self._exact[name]
        return next((key for pattern, key in self._patterns if pattern.fullmatch(name)), None)

    def is_block(self, name: str) -> bool:
        """Return whether ``name`` is a block of options, i.e. the table has options whose names begin with
        ``name.``"""
        name = self._normal(name)
        depth = name.count(".") + 1
        blocks = {".".join(parts[:depth]) for key in self.keys if len(parts := key.name.split(".")) > depth}
        return any(_pattern(block).fullmatch(name) for block in blocks)

    def nearest(self, name: str) -> str:
        """Return a sentence that suggests known options similar to the unknown option ``name``."""
        return nearest_names(
            self._normal(name), [key.name for key in self.keys if not key.name.endswith("**")]
        )


def nearest_names(name: str, known: list[str]) -> str:
    """Return a sentence that suggests names in ``known`` that are similar to the unknown ``name``."""
    last = name.rpartition(".")[2]
    near = [one for one in known if one.rpartition(".")[2] == last]
    near += difflib.get_close_matches(name, known, n=2, cutoff=0.7)
    if not near:
        lasts = {one.rpartition(".")[2]: one for one in known}
        near = [lasts[one] for one in difflib.get_close_matches(last, lasts, n=2, cutoff=0.7)]
    if near := list(dict.fromkeys(near))[:3]:
        return f"Did you mean {' or '.join(near)}?"
    return f"The page of this dialect lists all keys; {shown_key(name)} resembles none."


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*\*", ".+").replace(r"\*", r"[^.]+"))


_KINDS = {
    "to": Kind.MAPPED,
    "joint": Kind.MAPPED,
    "fixed": Kind.FIXED,
    "unused": Kind.UNUSED,
    "refused": Kind.REFUSED,
}
_WINDOW = re.compile(r"\s*[(\[]?\s*(-1|\d{1,9})\s*,\s*(-1|\d{1,9})\s*[)\]]?\s*", re.ASCII)


def choice(words: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """Return a function that converts a value by looking it up in the mapping ``words``. The function raises
    ValueError if the mapping does not have the value as a key."""

    def convert(value: Any) -> Any:
        for word, meaning in words.items():
            if type(word) is type(value) and word == value:
                return meaning
        raise ValueError(f"must be one of {', '.join(map(shown, words))}")

    return convert


def integer(value: Any, *, least: int | None = None) -> int:
    """Return ``value`` if it is an integer of at least ``least`` (None: any integer). Otherwise, raises
    ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be an integer")
    return _at_least(value, least)


def number(value: Any, *, least: float | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("must be a number")
    return _at_least(value, least)


def _at_least(value: Any, least: float | None) -> Any:
    if least is not None and value < least:
        raise ValueError(f"must be at least {least:g}")
    return value


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _window(value: Any) -> dict[str, Any]:
    """Convert an attention window ``(left, right)`` to ``Model.attention_window``. ``left`` is the number of
    positions before a token that it attends to; -1 means all. ``right``, the number of positions after the
    token, is ignored, because the model is causal."""
    found = _WINDOW.fullmatch(str(value))
    if found is None:
        raise ValueError("must be two integers, left and right, -1 for no limit, e.g. (128,0)")
    left = int(found[1])
    if left == 0:
        raise ValueError("a window of 0 lets each token attend only to itself")
    # The right limit has no effect, because the model is causal.
    return {} if left < 0 else {"Model.attention_window": left}


def _betas(value: Any) -> dict[str, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("must be a list of two numbers")
    return {f"Optimizer.beta{place}": number(beta, least=0.0) for place, beta in enumerate(value, start=1)}


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "flag": flag,
    "inverted": lambda value: not flag(value),
    "where_true": lambda value: flag(value) or None,
    "false_where_true": lambda value: False if flag(value) else None,
    "truth": bool,
    "number": number,
    "count": lambda value: integer(value, least=0),
    "positive_or_none": lambda value: value if integer(value, least=-1) > 0 else None,
    "positive_or_all": lambda value: None if value == -1 else integer(value, least=1),
    "one_or_more": lambda value: max(1, integer(value, least=-1)),
    "more_than_one": lambda value: value if integer(value, least=-1) > 1 else None,
    "not_zero": lambda value: value if number(value, least=0.0) else None,
    "not_auto": lambda value: None if value == "auto" else value,
    "window": _window,
    "betas": _betas,
}
"""The conversion functions that ``by`` can name in a key table. If a function returns None, the key of
ppfleetx stays unset."""


def read_file(dialect: str) -> dict[str, Any]:
    return shipped_yaml(Path(__file__).parent / dialect / "keys.yaml")


def tables_of(
    content: Mapping[str, Any], prefixes: Mapping[str, str] | None = None
) -> dict[str, tuple[Key, ...]]:
    """Parse the content of a ``keys.yaml``, in which each top-level list is a table. Return the tables by
    name, with a :class:`Key` for each option of the other toolkit. ``prefixes`` maps the name of a table to a
    prefix for its option names, such as ``deepspeed_config.``."""
    return {
        name: tuple(key for row in rows for key in _keys(row, (prefixes or {}).get(name, "")))
        for name, rows in content.items()
        if isinstance(rows, list)
    }


def _keys(row: Mapping[str, Any], prefix: str) -> Iterator[Key]:
    (column,) = row.keys() & _KINDS.keys()
    kind = _KINDS[column]
    is_mapped = kind is Kind.MAPPED
    to = tuple(row[column].split()) if is_mapped else ()
    default = row.get("default")
    says = row.get("says", "") if is_mapped else row[column]
    if default is not None:
        says = "; ".join(filter(None, [says, f"default: {default}"]))
    accepts = tuple(row["only"]) if "only" in row else None
    convert = _conversion(row) if column == "to" else None
    for name in row["key"].split():
        yield Key(prefix + name, kind, to, convert, accepts, says, default)


def _conversion(row: Mapping[str, Any]) -> Callable[[Any], Any]:
    if "choices" in row:
        return choice(row["choices"])
    return CONVERSIONS[row["by"]] if "by" in row else same
