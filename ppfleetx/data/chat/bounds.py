"""How much a chat template may do: steps of its code, and the size of what it makes.

A template comes with a model, from an unknown author. Jinja's sandbox keeps it away from Python, but not from
running for ever or making a text of a billion characters. Both are errors here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

MAX_STEPS = 3_000_000
"""Lines of compiled template code; a conversation of a hundred turns takes some thousands."""
MAX_SIZE = 1 << 24
"""Characters of a text, or elements of a list."""
_MAX_NUMBER = 1_000_000  # as an argument of a filter or a function
_MAX_BITS = 1 << 16
_LARGE_NUMBER = re.compile(r"\d{6}|\*")


class TemplateLimitError(Exception):
    """A template runs too long or makes something too large."""


@contextmanager
def bounded_steps(most: int = MAX_STEPS) -> Iterator[None]:
    """Let Python functions that are called within take ``most`` steps together, in this thread.

    Raises:
        TemplateLimitError: from within, when they take more.
    """
    left = most

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise TemplateLimitError(f"it takes more than {most:,} steps; does it loop for ever?")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Raise TemplateLimitError for a result that would be too large."""
    if operator == "+" and _has_size(left) and _has_size(right):
        _check_size(len(left) + len(right))
    elif operator == "*":
        if _has_size(left) or _has_size(right):
            sized, count = (left, right) if _has_size(left) else (right, left)
            _check_size(len(sized) * (count if isinstance(count, int) else 1))
        elif isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))
    elif operator == "%" and isinstance(left, str):
        check_format(left)


def check_format(text: str) -> None:
    """Raise TemplateLimitError for a format that asks for a large width."""
    if _LARGE_NUMBER.search(text):
        raise TemplateLimitError(
            f"it formats with a width that is too large, or not written out: {text[:40]!r}"
        )


def check_call(name: str, value: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise TemplateLimitError if a filter, or a method of ``value``, would make something too large.

    Args:
        name: of the filter or method.
        value: what it is applied to.
        arguments, named: what it is given beside.
    """
    given = [*arguments, *named.values()]
    for one in (value, *given):
        if isinstance(one, list | tuple | dict):
            check_depth(one)
    for one in given:
        if isinstance(one, int) and abs(one) > _MAX_NUMBER:
            raise TemplateLimitError(f"it calls {name} with {one}")
    texts = [one for one in given if isinstance(one, str)]
    if name == "replace" and isinstance(value, str) and len(texts) > 1:
        count = value.count(texts[0]) if texts[0] else len(value) + 1
        _check_size(len(value) + count * len(texts[1]))
    elif name == "join":
        items = next((one for one in (value, *given) if isinstance(one, list | tuple | dict)), ())
        separator = next((one for one in (value, *given) if isinstance(one, str)), "")
        _check_size(len(items) * len(separator) + sum(len(one) for one in items if isinstance(one, str)))
    elif name in ("indent", "expandtabs", "translate") and isinstance(value, str):
        widest = max(
            (one if isinstance(one, int) else len(one) for one in given if _has_bound(one)), default=8
        )
        _check_size(len(value) * max(1, widest))
    elif name in ("format", "format_map") and isinstance(value, str):
        check_format(value)
    elif name in ("tojson", "round", "batch", "slice", "pprint"):
        small = 1000
        if any(isinstance(one, int) and abs(one) > small for one in given):
            raise TemplateLimitError(f"it calls {name} with a number above {small}")


def check_depth(value: Any) -> None:
    """Raise TemplateLimitError for lists within lists that hold too much altogether.

    Python writes a list that holds another twice with all its elements twice: forty lists of two are a text
    of 10^12 characters.
    """
    left = MAX_SIZE // 64
    level = [value]
    while level:
        below = []
        for node in level:
            children = [*node.keys(), *node.values()] if isinstance(node, dict) else node
            left -= len(children)
            if left < 0:
                raise TemplateLimitError("its lists hold too much")
            below += [one for one in children if isinstance(one, list | tuple | dict)]
        level = below


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateLimitError(f"it makes a text or a list of {size:,}; the most is {MAX_SIZE:,}")


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateLimitError(f"it makes a number of {bits:,} bits; the most is {_MAX_BITS:,}")


def _has_size(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple)


def _has_bound(value: Any) -> bool:
    return isinstance(value, int | str | dict)
