"""Finding special tokens in a text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any


class SpecialTokens:
    """Special tokens of a tokenizer that does not normalise text.

    As in the ``tokenizers`` library, the leftmost token is found first, and of those that begin there the
    longest; tokens marked ``normalized`` are looked for in what the others leave.

    Args:
        added: ``added_tokens`` of a ``tokenizer.json``.
    """

    def __init__(self, added: Sequence[dict[str, Any]]) -> None:
        self._ids = {entry["content"]: entry["id"] for entry in added}
        self._groups = [
            [entry["content"] for entry in added if bool(entry.get("normalized")) is normalized]
            for normalized in (False, True)
        ]

    @staticmethod
    def can_be_found(added: Sequence[dict[str, Any]]) -> bool:
        """Whether no token takes the spaces or looks at the words beside it."""
        return not any(entry.get(flag) for entry in added for flag in ("single_word", "lstrip", "rstrip"))

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        return [
            re.compile("|".join(map(re.escape, sorted(group, key=len, reverse=True))))
            for group in self._groups
            if group
        ]

    def split(self, text: str) -> list[str | int]:
        """The text in pieces: ids of special tokens, and the text between them; never empty."""
        pieces: list[str | int] = [text]
        for pattern in self._patterns:
            pieces = [
                part
                for piece in pieces
                for part in ([piece] if isinstance(piece, int) else self._cut(piece, pattern))
            ]
        return pieces or [text]

    def _cut(self, text: str, pattern: re.Pattern[str]) -> Iterator[str | int]:
        begin = 0
        for found in pattern.finditer(text):
            if begin < found.start():
                yield text[begin : found.start()]
            yield self._ids[found.group()]
            begin = found.end()
        if begin < len(text):
            yield text[begin:]
