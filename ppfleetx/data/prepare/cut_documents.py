"""Where documents end in a stream of bytes: lines, and paragraphs between blank lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["json", "line", "paragraph", "file"]

_BLANK_LINES = re.compile(rb"\r?\n(?:[ \t]*\r?\n)+")
_LEADING_BLANK_LINES = re.compile(rb"\A(?:[ \t]*\r?\n)+")
_PARAGRAPH_END = re.compile(rb"\n\r?\n")


@dataclass(frozen=True)
class _Ends:
    """Finds where documents end.

    Attributes:
        first, last: the offset behind the first or last delimiter in some bytes; 0 if there is none.
        overlap: bytes of a delimiter that may lie in the block before.
    """

    first: Callable[[bytes], int]
    last: Callable[[bytes], int]
    overlap: int


def _first_paragraph(block: bytes) -> int:
    match = _PARAGRAPH_END.search(block)
    return match.end() if match else 0


def _last_paragraph(block: bytes) -> int:
    plain, with_return = block.rfind(b"\n\n"), block.rfind(b"\n\r\n")
    return max(plain + 2 if plain >= 0 else 0, with_return + 3 if with_return >= 0 else 0)


_LINES = _Ends(lambda block: block.find(b"\n") + 1, lambda block: block.rfind(b"\n") + 1, overlap=0)
_PARAGRAPHS = _Ends(_first_paragraph, _last_paragraph, overlap=2)


def cut_documents(blocks: Iterable[bytes], kind: Kind, max_bytes: int) -> Iterator[bytes | None]:
    """The text of ``blocks`` anew, cut where documents end.

    A piece holds many documents, or one that several blocks were needed for. No more than ``max_bytes`` and a
    block are held at a time: a document that is longer is read over.

    Args:
        blocks: consecutive bytes, each at most ``max_bytes``.
        kind: what ends a document.
        max_bytes: the longest document.

    Returns:
        Pieces; None in the place of each document that is too long.
    """
    ends = _PARAGRAPHS if kind == "paragraph" else _LINES
    pending: list[bytes] = []
    num_pending = 0
    before = b""  # what an end may have begun in
    is_too_long = False
    for block in blocks:
        seen = before + block if before else block
        shift = len(before)
        before = seen[-ends.overlap :] if ends.overlap else b""
        if is_too_long:
            end = ends.first(seen)
            if not end:
                continue
            yield None
            is_too_long, block, seen, shift = False, seen[end:], seen[end:], 0
        end = max(0, ends.last(seen) - shift)
        pending.append(block[:end] if end else block)
        num_pending += len(pending[-1])
        if end:
            yield from _within(b"".join(pending), ends, max_bytes)
            pending = [block[end:]]
            num_pending = len(block) - end
        elif num_pending > max_bytes:
            is_too_long, pending, num_pending = True, [], 0
    if is_too_long:
        yield None
    elif num_pending:
        yield b"".join(pending)


def _within(piece: bytes, ends: _Ends, max_bytes: int) -> Iterator[bytes | None]:
    """Whole documents, of which only the first ones, begun in earlier blocks, can be too long."""
    while len(piece) > max_bytes:
        end = ends.first(piece)
        yield piece[:end] if end <= max_bytes else None
        piece = piece[end:]
    if piece:
        yield piece


def paragraphs(text: bytes) -> Iterator[bytes]:
    """What lies between blank lines, without the line ends around it."""
    # A cut behind one blank line can leave further ones at the start of the next piece.
    for paragraph in _BLANK_LINES.split(_LEADING_BLANK_LINES.sub(b"", text)):
        if paragraph.strip():
            yield paragraph.strip(b"\r\n")
