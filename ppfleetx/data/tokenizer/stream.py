"""Text of token ids as they come, one after the other."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

_CONTEXT = 8  # tokens before the next one that may decide how it is written
_LONG = 64
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class StreamDecoder(Protocol):
    """Decodes ids as they come, holding back a character that is not complete yet.

    The pieces joined, with that of `finish`, are what `Tokenizer.decode` gives for all ids at once.
    """

    def feed(self, token_id: int) -> str:
        """Text that became certain with this id; may be empty."""

    def finish(self) -> str:
        """The rest: an incomplete character comes out as U+FFFD."""


class ByteStreamDecoder:
    """Of tokens that are bytes.

    Args:
        table: bytes of each id; others have none.
        skipped: ids that give nothing.
    """

    def __init__(self, table: Mapping[int, bytes], skipped: Collection[int]) -> None:
        self._table, self._skipped = table, skipped
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._bytes.decode(self._table.get(token_id, b""))

    def finish(self) -> str:
        return self._bytes.decode(b"", final=True)


class TextStreamDecoder:
    """Of tokens whose text depends on those before them: a space at the beginning is left out, and
    characters may be written as the bytes ``<0xE4><0xBD><0xA0>``.

    Args:
        decode: text of ids.
        tokens: text of each token as the vocabulary has it.
        skipped: ids that give nothing.
        after: ids that the text goes on from.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        tokens: Mapping[int, str],
        skipped: Collection[int],
        after: Sequence[int] = (),
    ) -> None:
        self._decode, self._tokens, self._skipped = decode, tokens, skipped
        self._ids = [one for one in after if one not in skipped]
        while self._ids and self._is_byte(self._ids[-1]):
            self._ids.pop()  # the rest of a character that is cut here is no text
        self._shorten()

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        if self._is_byte(token_id):
            return ""  # bytes are text or not as a whole, with those that follow
        piece = self.finish()
        if len(self._ids) > _LONG:
            self._shorten()
        return piece

    def finish(self) -> str:
        text = self._decode(self._ids)
        piece, self._sent = text[self._sent :], len(text)
        return piece

    def _is_byte(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._tokens.get(token_id, "")) is not None

    def _shorten(self) -> None:
        self._ids = self._ids[-_CONTEXT:]
        self._sent = len(self._decode(self._ids))
