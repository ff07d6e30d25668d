"""Which rank wrote a line, where the lines of several come together."""

from __future__ import annotations

import io
import re

_MARK = re.compile(r"^\[rank (\d+)\] ")


def mark_of(line: str) -> int | None:
    """The rank that wrote a line to its standard error; None for other lines."""
    found = _MARK.match(line)
    return None if found is None else int(found[1])


def without_mark(line: str) -> str:
    """The line as the rank wrote it."""
    return _MARK.sub("", line, count=1)


class MarkedStream(io.TextIOBase):
    """Writes ``[rank N] `` before each line, so that it is known whose it is where several come together."""

    def __init__(self, stream: io.TextIOBase, rank: int) -> None:
        self._stream, self._mark, self._at_start = stream, f"[rank {rank}] ", True

    def write(self, text: str) -> int:
        lines = text.splitlines(keepends=True)
        for line in lines:
            self._stream.write(f"{self._mark}{line}" if self._at_start else line)
            self._at_start = line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()
