"""JSON records: one per line, or the items of one array."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ppfleetx.config.errors import DataError
from ppfleetx.data.text.files import read_lines

_SPACE = re.compile(r"[ \t\r\n]*")


def read_records(path: Path, see: Callable[[bytes], object] = len) -> Iterator[tuple[int, bytes]]:
    """The records of a file, as (line where it begins, text of it).

    Records are the lines that are not empty or, in a ``.json`` file that begins with ``[``, the items of the
    array.

    Args:
        path: the file, compressed or not.
        see: called with all bytes in order, to hash them.

    Raises:
        DataError: as in `read_lines`, or the array is not JSON. Lines are not parsed yet.
    """
    lines = read_lines(path, see)
    first = next(((number, line) for number, line in lines if line.strip()), None)
    if first is None:
        return
    if path.suffix == ".json" and first[1].lstrip().startswith(b"["):
        yield from _items(path, first, lines)
        return
    yield first
    yield from ((number, line) for number, line in lines if line.strip())


def _items(
    path: Path, first: tuple[int, bytes], lines: Iterator[tuple[int, bytes]]
) -> Iterator[tuple[int, bytes]]:
    content = b"\n".join([first[1], *(line for _, line in lines)])
    number, decoder, place = first[0], json.JSONDecoder(), 0
    try:
        text = content.decode("utf-8")
        start = _SPACE.match(text, text.index("[") + 1).end()
        is_empty = text.startswith("]", start)
        while not is_empty:
            _, end = decoder.raw_decode(text, start)
            number, place = number + text.count("\n", place, start), start
            yield number, text[start:end].encode()
            after = _SPACE.match(text, end).end()
            if not text.startswith(",", after):
                break
            start = _SPACE.match(text, after + 1).end()
        end = start if is_empty else after
        if not text.startswith("]", end) or _SPACE.match(text, end + 1).end() != len(text):
            raise json.JSONDecodeError("the array does not end here", text, end)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{first[0] + error.lineno - 1}: this is not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: this is not JSON: {error}") from error


def load_line(line: bytes) -> Any:
    """The value of a line of JSON.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
        ValueError: it is not JSON, or too deeply nested.
    """
    try:
        return json.loads(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("too deeply nested") from None
