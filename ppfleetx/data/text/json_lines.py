"""One line of JSON, without more memory than the length of its texts explains."""

from __future__ import annotations

import json
import re
from typing import Any

_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
# An empty object takes 24 times the bytes it is written with, a text hardly more than its own. So what lies
# outside of texts is measured, in lines long enough to matter.
_MAX_STRUCTURE_BYTES = 4_000_000


def load_line(line: bytes) -> Any:
    """The value a line holds.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
        ValueError: it is not JSON, or JSON of too many or too deeply nested values.
    """
    text = line.decode("utf-8")
    if len(line) > _MAX_STRUCTURE_BYTES and len(_STRINGS.sub(b"", line)) > _MAX_STRUCTURE_BYTES:
        raise ValueError(f"more than {_MAX_STRUCTURE_BYTES:,} bytes beside its texts")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too deeply nested") from None
