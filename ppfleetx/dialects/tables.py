"""Key tables as data: ``keys.yaml`` of each dialect.

The tables of a file are those of the dialect's page. A row says what happens to a key, or to several keys
with blanks between them:

- ``to``: the native keys that its value becomes, as it is, or ``by`` one of `CONVERSIONS`, or by a table of
  ``choices``;
- ``joint``: native keys that a rule of the dialect computes from this key and others;
- ``fixed``: nothing follows this key, for this reason; with ``only``, no other values are accepted;
- ``unused``: the key has no meaning here, for this reason;
- ``refused``: the key is an error, for this reason.

``says`` is a note for the page. ``*`` stands for any one part of a key, a last ``**`` for one or more parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ppfleetx.dialects.keys import Key, Kind, same
from ppfleetx.dialects.translate import choice, flag, integer, number

_KINDS = {
    "to": Kind.MAPPED,
    "joint": Kind.MAPPED,
    "fixed": Kind.FIXED,
    "unused": Kind.UNUSED,
    "refused": Kind.REFUSED,
}
_WINDOW = re.compile(r"\s*[(\[]?\s*(-1|\d{1,9})\s*,\s*(-1|\d{1,9})\s*[)\]]?\s*", re.ASCII)


def _window(value: Any) -> dict[str, Any]:
    """``(left, right)``: a causal model has no right side, and a left side of -1 is no window."""
    found = _WINDOW.fullmatch(str(value))
    if found is None:
        raise ValueError("must be two integers, left and right, -1 for no limit, e.g. (128,0)")
    left = int(found[1])
    if left == 0:
        raise ValueError("a window of 0 lets each token see itself alone")
    return {} if left < 0 else {"Model.attention_window": left}


def _betas(value: Any) -> dict[str, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("must be a list of two numbers")
    return {f"Optimizer.beta{place}": number(beta) for place, beta in enumerate(value, start=1)}


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "flag": flag,
    "inverted": lambda value: not flag(value),
    "where_true": lambda value: flag(value) or None,
    "false_where_true": lambda value: False if flag(value) else None,
    "truth": bool,
    "number": number,
    "count": lambda value: integer(value, least=0),
    "positive_or_none": lambda value: (
        None if value in (-1, 0) and not isinstance(value, bool) else integer(value)
    ),
    "positive_or_all": lambda value: None if value == -1 else integer(value),
    "window": _window,
    "betas": _betas,
}
"""Functions from the value of a key to native values; None leaves the native key open."""


def read_file(dialect: str) -> dict[str, Any]:
    """The content of ``keys.yaml`` of a dialect."""
    text = (Path(__file__).parent / dialect / "keys.yaml").read_text("utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - safe, both of them


def tables_of(
    content: Mapping[str, Any], prefixes: Mapping[str, str] | None = None
) -> dict[str, tuple[Key, ...]]:
    """The tables of a file by name.

    Args:
        content: the file, see :func:`read_file`; what is no list of rows is not a table.
        prefixes: what stands before all keys of a table.
    """
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
    says = row.get("says", "") if is_mapped else row[column]
    accepts = tuple(row["only"]) if "only" in row else None
    convert = _conversion(row) if column == "to" else None
    for name in row["key"].split():
        yield Key(prefix + name, kind, to, convert, accepts, says)


def _conversion(row: Mapping[str, Any]) -> Callable[[Any], Any]:
    if "choices" in row:
        return choice(row["choices"])
    return CONVERSIONS[row["by"]] if "by" in row else same
