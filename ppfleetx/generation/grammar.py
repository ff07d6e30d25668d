"""Constrain a row to JSON, a regular expression or a grammar, by the library llguidance."""

from __future__ import annotations

import importlib.util
import json
from functools import lru_cache
from typing import Any

import numpy as np

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.generation import StructuredOutputs
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.generation.text import NoTokenizer, text_bytes

_KEY = "Generation.structured_outputs"
_MOST_MATCHERS = 256
_WHITESPACE = r" |\n {0,20}"
"""White space between the parts of JSON. It is limited, because small models otherwise write only spaces."""


class Grammar:
    """Determines which tokens may come next in a row, by a grammar of llguidance and its tokenizer. Rows
    may share it. Raises ConfigError if the grammar is invalid."""

    def __init__(self, grammar: str, tokenizer: Any, vocab_size: int) -> None:
        from llguidance import LLMatcher

        start = LLMatcher(tokenizer, grammar, log_level=0)
        if start.is_error():
            raise ConfigError(start.get_error().splitlines()[0], key=_KEY)
        self._start, self._vocab_size = start, vocab_size
        self._matchers: dict[tuple[int, ...], Any] = {}  # by the new tokens of a row

    @classmethod
    def of(
        cls, form: StructuredOutputs, tokenizer: Tokenizer | NoTokenizer, end_ids: tuple[int, ...]
    ) -> Grammar:
        """Build the grammar for a form of continuation that ends with one of ``end_ids``. Raises
        ConfigError if the library is missing, it does not support the form, or there is no end token."""
        if importlib.util.find_spec("llguidance") is None:
            raise ConfigError("needs llguidance: pip install 'ppfleetx[structured]'", key=_KEY)
        if isinstance(tokenizer, NoTokenizer):
            raise ConfigError("without a tokenizer there is no text that could have a form", key=_KEY)
        if not end_ids:
            raise ConfigError(
                "a text in this form ends at an end token, and none is set (eos_token_id, ignore_eos)",
                key=_KEY,
            )
        return cls(_grammar(form), _tokenizer(tokenizer, end_ids), tokenizer.vocab_size)

    def allowed(self, new: tuple[int, ...]) -> np.ndarray:
        """Which tokens may follow the new tokens of a row, ``[V]`` bool."""
        matcher = self._matchers.pop(new[:-1], None) if new else None
        if matcher is None:
            matcher = self._start.deep_copy()
            matcher.consume_tokens(list(new))
        elif not matcher.is_stopped():
            matcher.consume_token(new[-1])
        self._matchers[new] = matcher
        if len(self._matchers) > _MOST_MATCHERS:  # matchers of rows that have ended remain
            self._matchers.pop(next(iter(self._matchers)))
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)


def _grammar(form: StructuredOutputs) -> str:
    from llguidance import LLMatcher, grammar_from

    schema = {"type": "object"} if form.json_object else form.json_schema
    if schema is not None:
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE})
    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.choice is not None:
        return grammar_from("choice", json.dumps(form.choice))
    try:
        return grammar_from("grammar", form.grammar)
    except ValueError as error:
        raise ConfigError(str(error), key=f"{_KEY}.grammar") from error


@lru_cache(maxsize=4)  # a table of the whole vocabulary takes a while to build
def _tokenizer(tokenizer: Tokenizer, end_ids: tuple[int, ...]) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text)

    encode.eos_token_id, encode.bos_token_id = end_ids[0], None
    encode.tokens = [text_bytes(tokenizer, one) for one in range(tokenizer.vocab_size)]
    encode.special_token_ids = sorted(tokenizer.special_ids)
    return LLTokenizer(TokenizerWrapper(encode), eos_token=list(end_ids))
