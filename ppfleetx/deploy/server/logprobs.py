"""Scores of tokens as OpenAI's two interfaces write them."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any

from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.generation.sampling import TokenScore

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_LOWEST = -9999.0
"""In place of minus infinity, which JSON has not (OpenAI's interface has the same number)."""


class TokenTexts:
    """The bytes and the text of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token: int) -> bytes:
        """The text of a token; pieces with U+2581 begin with a space."""
        value = self._tokenizer.token_bytes(token)
        if self._tokenizer.is_byte_level:
            return value
        single = _BYTE_TOKEN.fullmatch(value.decode("utf-8", "replace"))
        return bytes([int(single.group(1), 16)]) if single else value.replace("\u2581".encode(), b" ")

    def text_of(self, token: int) -> str:
        """A token as text; part of a character as ``bytes:\\xe2\\x82``."""
        value = self.bytes_of(token)
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in value)


class TextLogprobs:
    """``logprobs`` of completions: four lists, which go on from piece to piece.

    Offsets are characters of the tokens one behind the other: BOS, which is in no text, counts as well.

    Args:
        texts: of tokens.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts, self._offset = texts, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        """The next tokens."""
        offsets = []
        for score in scores:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._texts.bytes_of(score.token)))
        return {
            "tokens": [self._texts.text_of(score.token) for score in scores],
            "token_logprobs": [_number(score.logprob) for score in scores],
            "top_logprobs": [self._top(score) for score in scores],
            "text_offset": offsets,
        }

    def _top(self, score: TokenScore) -> dict[str, float | None] | None:
        if score.logprob is None:
            return None
        top = {self._texts.text_of(token): _number(logprob) for token, logprob in score.top}
        return {**top, self._texts.text_of(score.token): _number(score.logprob)}


def chat_logprobs(texts: TokenTexts, scores: Sequence[TokenScore]) -> dict[str, Any]:
    """``logprobs`` of a chat."""
    content = [
        {
            **_entry(texts, score.token, score.logprob),
            "top_logprobs": [_entry(texts, token, logprob) for token, logprob in score.top],
        }
        for score in scores
    ]
    return {"content": content, "refusal": None}


def _entry(texts: TokenTexts, token: int, logprob: float | None) -> dict[str, Any]:
    text, value = texts.text_of(token), list(texts.bytes_of(token))
    return {"token": text, "logprob": _number(logprob), "bytes": value}


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LOWEST)
