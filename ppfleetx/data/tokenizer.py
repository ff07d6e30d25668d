"""Byte-level BPE: text to token ids and back.

Encoding runs through ``tiktoken`` on the tokenizer's own merges, several times faster than ``tokenizers`` and
with the same ids (`ppfleetx.data.bpe_ranks` says why). A tokenizer that tiktoken cannot express runs through
``tokenizers``. Nothing is ever downloaded.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ppfleetx.config.errors import DataError
from ppfleetx.data.tokenizer_engines import Engine, build_engine
from ppfleetx.data.tokenizer_files import (
    END_OF_DOCUMENT,
    read_definition,
    read_vocab_and_merges,
    token_to_bytes,
    write_definition,
)


class Tokenizer:
    """A tokenizer read from files.

    Text is only text: ``<|endoftext|>`` inside it is encoded like any other characters, and no token is added
    at either end. The end-of-document token also serves as padding.

    Args:
        definition: what a ``tokenizer.json`` holds, see `ppfleetx.data.tokenizer_files`.
        eod_token: the token that ends a document.
        place: where the definition came from; used in messages.
    """

    def __init__(
        self, definition: dict[str, Any], *, eod_token: str = END_OF_DOCUMENT, place: str = "the tokenizer"
    ) -> None:
        self.place = place
        self.eod_token = eod_token
        self._definition = definition
        self._engine: Engine = build_engine(definition, place)
        added = definition.get("added_tokens") or []
        self._special = {entry["content"]: entry["id"] for entry in added if entry.get("special")}

    def __reduce__(self) -> tuple[Any, ...]:  # the engines' own objects do not pickle
        return _rebuild, (self._definition, self.eod_token, self.place)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, eod_token: str = END_OF_DOCUMENT) -> Tokenizer:
        """Load from a directory, a ``tokenizer.json``, or a ``vocab.json`` with ``merges.txt`` beside it.

        Raises:
            DataError: a file is missing or damaged.
        """
        return cls(read_definition(path), eod_token=eod_token, place=os.fspath(path))

    @classmethod
    def from_vocab_and_merges(
        cls,
        vocab_path: str | os.PathLike[str],
        merges_path: str | os.PathLike[str],
        *,
        eod_token: str = END_OF_DOCUMENT,
    ) -> Tokenizer:
        """Load a GPT-2 style pair of files, wherever they lie."""
        definition = read_vocab_and_merges(vocab_path, merges_path)
        return cls(definition, eod_token=eod_token, place=os.fspath(vocab_path))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the files that this class and Hugging Face ``transformers`` load."""
        eod = self.eod_token if self.eod_token in self._ids else None
        write_definition(self._definition, directory, eod)

    @property
    def engine_name(self) -> str:
        """``tiktoken`` or ``tokenizers``: the library that encodes."""
        return self._engine.name

    # ---- vocabulary

    @cached_property
    def _ids(self) -> dict[str, int]:
        return self._engine.ids

    @cached_property
    def vocab_size(self) -> int:
        """Highest token id plus one: the true vocabulary of a model, before padding."""
        return max(self._ids.values()) + 1

    @cached_property
    def eod_id(self) -> int:
        """Id of the end-of-document token.

        Raises:
            DataError: the vocabulary has no such token.
        """
        token_id = self._ids.get(self.eod_token)
        if token_id is None:
            others = ", ".join(self._special) or "none"
            raise DataError(
                f"{self.place} has no end-of-document token {self.eod_token!r}; its special tokens: {others}"
            )
        return token_id

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        return frozenset(self._special.values())

    @cached_property
    def _tokens(self) -> dict[int, str]:
        return {token_id: token for token, token_id in self._ids.items()}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides the ids: vocabulary, merges, special tokens, how text is cut up.

        ``vocab.json`` + ``merges.txt`` and a ``tokenizer.json`` of the same tokenizer have the same one.
        """
        return hashlib.sha256(json.dumps(self._engine.identity, sort_keys=True).encode()).hexdigest()

    # ---- text to ids

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``.

        Raises:
            DataError: ``text`` holds a lone surrogate, which no UTF-8 text can.
        """
        return self.encode_to_numpy(text).tolist()

    def encode_to_numpy(self, text: str) -> np.ndarray:
        """Token ids of ``text`` as an integer array (uint32 or int64); quicker than `encode`."""
        try:
            return self._engine.encode(text)
        except UnicodeEncodeError as error:
            raise DataError(
                f"character {error.start} of the text is the lone surrogate U+{ord(text[error.start]):04X}, "
                "which is not text"
            ) from error

    # ---- ids to text

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes a token stands for; none for an id outside the vocabulary (a padding row of the model)."""
        return self._bytes.get(token_id, b"")

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        added = {entry["id"] for entry in self._definition.get("added_tokens") or []}
        table = {}
        for token, token_id in self._ids.items():
            value = None if token_id in added else token_to_bytes(token)
            table[token_id] = token.encode("utf-8") if value is None else value
        return table

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = False) -> str:
        """Text of ``ids``. Ids outside the vocabulary give nothing; bytes that are not UTF-8 give U+FFFD."""
        values = np.asarray(ids).tolist()
        if skip_special_tokens:
            special = self.special_ids
            values = [token_id for token_id in values if token_id not in special]
        if not self._engine.is_byte_level:
            return self._engine.decode([token_id for token_id in values if token_id in self._tokens])
        table = self._bytes
        return b"".join([table.get(token_id, b"") for token_id in values]).decode("utf-8", errors="replace")

    def stream_decoder(self, *, skip_special_tokens: bool = False) -> StreamDecoder:
        """A decoder to be fed one id after the other."""
        return StreamDecoder(self, skip_special_tokens)


def _rebuild(definition: dict[str, Any], eod_token: str, place: str) -> Tokenizer:
    return Tokenizer(definition, eod_token=eod_token, place=place)


class StreamDecoder:
    """Decodes ids as they come, holding back the bytes of a character that is not complete yet.

    The pieces joined, with that of `finish`, are what `Tokenizer.decode` gives for all ids at once.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids: list[int] = []
        self._sent = ""

    def feed(self, token_id: int) -> str:
        """Text that became certain with this id; may be empty."""
        if token_id in self._skipped:
            return ""
        if self._tokenizer._engine.is_byte_level:
            return self._bytes.decode(self._tokenizer.token_bytes(token_id))
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith("\ufffd") else self._send(text)

    def finish(self) -> str:
        """The rest: an incomplete character comes out as U+FFFD."""
        if self._tokenizer._engine.is_byte_level:
            return self._bytes.decode(b"", final=True)
        return self._send(self._tokenizer.decode(self._ids))

    def _send(self, text: str) -> str:
        new, self._sent = text[len(self._sent) :], text
        return new
