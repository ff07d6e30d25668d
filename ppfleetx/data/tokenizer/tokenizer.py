"""Convert text to token ids and back, with a tokenizer read from a directory. Nothing is downloaded."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ppfleetx.config.errors import DataError, shown
from ppfleetx.data.tokenizer.backends import build_engine
from ppfleetx.data.tokenizer.json_files import (
    BYTE_CHARACTERS,
    END_OF_DOCUMENT,
    TokenizerFiles,
    file_texts,
    make_definition,
    read_files,
    read_vocab_and_merges,
    token_to_bytes,
    write_files,
)
from ppfleetx.data.tokenizer.transformers_tokenizer import SideFiles, as_transformers
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.config.sections.data import TokenizerConfig


_CONTEXT = 8  # earlier tokens that may affect the text of the next token
_LONG = 64
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class ByteStreamDecoder:
    """Decodes the ids of a byte-level tokenizer one by one. ``table[i]`` is the bytes of id i. Ids in
    ``skipped`` produce no text."""

    def __init__(self, table: Mapping[int, bytes], skipped: Collection[int]) -> None:
        self._table, self._skipped = table, skipped
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """Decode the next id. Returns the characters that are now complete; empty if there are none."""
        return "" if token_id in self._skipped else self._bytes.decode(self._table.get(token_id, b""))

    def finish(self) -> str:
        """Return the text that `feed` still holds back after the last id. An incomplete character becomes
        U+FFFD."""
        return self._bytes.decode(b"", final=True)

    def pending(self) -> str:
        """Return the text that `feed` holds back because later ids could change it."""
        return ""


class TextStreamDecoder:
    """Decodes ids one by one for tokenizers such as SentencePiece, in which the text of a token depends on
    earlier tokens. ``after`` has the ids that precede the first id to decode, such as a prompt."""

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
            self._ids.pop()  # an incomplete character has no text
        self._shorten()

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        if self._is_byte(token_id):
            return ""  # a run of byte tokens has no text until it is complete
        piece = self.finish()
        if len(self._ids) > _LONG:
            self._shorten()
        return piece

    def finish(self) -> str:
        text = self._decode(self._ids)
        piece, self._sent = text[self._sent :], len(text)
        return piece

    def pending(self) -> str:
        is_run = bool(self._ids) and self._is_byte(self._ids[-1])
        return self._decode(self._ids)[self._sent :] if is_run else ""

    def _is_byte(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._tokens.get(token_id, "")) is not None

    def _shorten(self) -> None:
        self._ids = self._ids[-_CONTEXT:]
        self._sent = len(self._decode(self._ids))


class Tokenizer:
    """Converts text to token ids and back, as described by a tokenizer's files. There are three ways to
    encode:

    - `encode`, used for corpora, treats everything as plain text, ``<|endoftext|>`` included, and adds no
      token.
    - `encode_prompt` equals Hugging Face's ``AutoTokenizer``: special tokens in the text become their ids,
      and tokens such as BOS are added around the text.
    - `encode_continuation` encodes text that follows a prompt.

    ``eod_token`` ends documents and serves as padding. None: the ``eos_token`` of the files or, if they name
    none, ``<|endoftext|>``. Raises DataError if the files are damaged or of an unknown kind.
    """

    def __init__(
        self,
        files: TokenizerFiles | dict[str, Any],
        *,
        eod_token: str | None = None,
        place: str = "the tokenizer",
    ) -> None:
        self.place = place
        self._files = files if isinstance(files, TokenizerFiles) else TokenizerFiles(files)
        self._side = SideFiles(self._files.side_texts, place)
        made = as_transformers(self._files.definition, self._side, is_file=self._files.has_definition)
        self._given_eod_token, self._bos_token = eod_token, made.bos_token
        self.eod_token = eod_token or made.eos_token or END_OF_DOCUMENT
        self.prefix_ids, self.suffix_ids = made.before, made.after
        self.special_token_texts = made.named
        """Special tokens as strings, by their names in transformers, such as ``bos_token``."""
        self.definition = made.definition
        """The content of ``tokenizer.json``, including tokens that come from the files beside it."""
        self._engine = build_engine(made.definition, place)
        added = made.definition.get("added_tokens") or []
        self._special = {entry["content"]: entry["id"] for entry in added if entry.get("special")}
        self._limit: int | None = None
        wrong = [one for one in (*made.before, *made.after) if not 0 <= one < self.vocab_size]
        if wrong:
            raise DataError(f"{place}: its post-processor adds the id {wrong[0]}, which it does not have")

    def __reduce__(self) -> tuple[Any, ...]:  # the library objects in the engines cannot be pickled
        again = partial(Tokenizer, eod_token=self._given_eod_token, place=self.place)
        return again, (self._files,), {"_limit": self._limit}

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, eod_token: str | None = None) -> Tokenizer:
        """Load a tokenizer. ``path`` is a directory, a ``tokenizer.json``, or a ``vocab.json`` with
        ``merges.txt`` beside it. Raises DataError if a file is missing or damaged."""
        return cls(read_files(path), eod_token=eod_token, place=os.fspath(path))

    @classmethod
    def from_vocab_and_merges(
        cls,
        vocab_path: str | os.PathLike[str],
        merges_path: str | os.PathLike[str],
        *,
        eod_token: str | None = None,
    ) -> Tokenizer:
        files = TokenizerFiles(read_vocab_and_merges(vocab_path, merges_path), has_definition=False)
        return cls(files, eod_token=eod_token, place=os.fspath(vocab_path))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the tokenizer to a directory that this class and Hugging Face ``transformers`` can load."""
        write_files(self.files(), directory)

    def files(self) -> dict[str, str]:
        """Return the contents of the files that :meth:`save` writes, by file name."""
        eod = self.eod_token if self.has_eod else None
        return file_texts(self._side.with_eos(self._files, eod), eod)

    @property
    def engine_name(self) -> str:
        """The name of the library that encodes text: ``tiktoken`` or ``tokenizers``."""
        return self._engine.name

    @property
    def is_byte_level(self) -> bool:
        """Whether each token stands for fixed bytes, whatever tokens precede it."""
        return self._engine.is_byte_level

    # ---- vocabulary

    @cached_property
    def _ids(self) -> dict[str, int]:
        return self._engine.ids

    @property
    def vocab_size(self) -> int:
        """The highest token id plus one. ``Model.vocab_size`` must be at least this large, except after
        `leave_out_tokens`."""
        return self._count if self._limit is None else min(self._count, self._limit)

    @cached_property
    def _count(self) -> int:
        return max(self._ids.values()) + 1

    def leave_out_tokens(self, vocab_size: int) -> list[str]:
        """Refuse from now on to encode texts that contain one of the added tokens for which a model with
        ``vocab_size`` ids has no embedding. Returns these tokens. Nothing changes, and the result is empty,
        if there are none, if a token of the vocabulary itself has such an id, or if a token that is needed
        does, such as the end-of-document token."""
        beyond = {token: token_id for token, token_id in self._ids.items() if token_id >= vocab_size}
        added = {entry["content"] for entry in self.definition.get("added_tokens") or []}
        needed = {*self.prefix_ids, *self.suffix_ids, *(self.end_ids if self.has_eod else ())}
        if not beyond or not beyond.keys() <= added or not needed.isdisjoint(beyond.values()):
            return []
        self._limit = vocab_size
        return sorted(beyond, key=beyond.__getitem__)

    @cached_property
    def eod_id(self) -> int:
        """The id of the end-of-document token. Raises DataError if the vocabulary lacks it."""
        token_id = self._ids.get(self.eod_token)
        if token_id is None:
            others = ", ".join(self._special) or "none"
            raise DataError(
                f"{self.place} has no end-of-document token {self.eod_token!r}; its special tokens: {others}"
            )
        return token_id

    @property
    def has_eod(self) -> bool:
        return self.eod_token in self._ids

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """The chat templates in the tokenizer's directory, by name; the standard template is called
        ``default``. Raises DataError if ``tokenizer_config.json`` is damaged."""
        return self._side.chat_templates

    @cached_property
    def start_id(self) -> int:
        """The id with which generation starts if the prompt is empty: BOS or, if there is no BOS, the
        end-of-document token.
        """
        start = self._ids.get(self._bos_token) if self._bos_token is not None else None
        return self.eod_id if start is None else start

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end generation: the end-of-document token, and ``eos_token_id`` of
        ``generation_config.json``. Raises DataError if neither exists."""
        named = self._side.end_ids
        own = () if named and not self.has_eod else (self.eod_id,)
        return tuple(dict.fromkeys((*own, *named)))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._special.values())

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with this text; None if there is none."""
        return self._special.get(text)

    @cached_property
    def _tokens(self) -> dict[int, str]:
        return {token_id: token for token, token_id in self._ids.items()}

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 hash of everything that determines how text is converted to ids: vocabulary, merges,
        special tokens, splitting rules. Tokens that `encode_prompt` adds around the text are not included."""
        definition = self._files.definition
        vocab, listed = definition["model"].get("vocab") or {}, definition.get("added_tokens") or []
        of_file = {*(token if isinstance(token, str) else token[0] for token in vocab)}
        of_file.update(entry["content"] for entry in listed)
        identity = self._engine.identity(definition)
        added = sorted(self._ids.keys() - of_file)  # added by the side files
        if added:
            identity |= {"added": added}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    # ---- text to ids

    def encode(self, text: str) -> list[int]:
        """Encode ``text`` as plain text: special tokens in it are not recognized, and no token is added.
        Raises DataError for a lone surrogate, which UTF-8 cannot represent."""
        return self.encode_to_numpy(text).tolist()

    def encode_to_numpy(self, text: str) -> np.ndarray:
        """Encode ``text`` as `encode` does, but return an integer array (uint32 or int64), which is faster.
        Raises DataError for a lone surrogate."""
        return self._encode(text, special=False, continues=False)

    def encode_prompt(
        self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True
    ) -> list[int]:
        """Encode a prompt as Hugging Face's ``AutoTokenizer`` does by default. With ``add_special_tokens``,
        `prefix_ids` and `suffix_ids` are added around the text. With ``parse_special_tokens``, special tokens
        in the text become their ids, unless ``tokenizer_config.json`` sets ``split_special_tokens``."""
        ids = self._encode(text, special=parse_special_tokens, continues=False).tolist()
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special_tokens else ids

    def encode_continuation(self, text: str, *, parse_special_tokens: bool = True) -> list[int]:
        """Encode ``text`` as the continuation of earlier text, such as the response to a prompt. No token and
        no space is added before it."""
        return self._encode(text, special=parse_special_tokens, continues=True).tolist()

    def encode_marked(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Encode ``text``, and mark the tokens in ``spans``, such as the assistant's turns of a chat. A span
        is a range ``[start, end)`` of characters. Special tokens in the text become their ids, as in
        `encode_prompt`, but no token is added around the text. Returns the ids, int64 [n], and a mask, bool
        [n], that is True for tokens with characters in a span."""
        with _surrogate_errors(text):
            ids, mask = self._engine.encode_marked(text, spans, special=self._side.parses_special_tokens)
        self._check(ids)
        return ids, mask

    def _encode(self, text: str, *, special: bool, continues: bool) -> np.ndarray:
        with _surrogate_errors(text):
            special = special and self._side.parses_special_tokens
            ids = self._engine.encode(text, special=special, continues=continues)
        self._check(ids)
        return ids

    def _check(self, ids: np.ndarray) -> None:
        if self._limit is None or not ids.size or (highest := int(ids.max())) < self._limit:
            return
        raise DataError(
            f"the text contains {self._tokens[highest]!r}, the token {highest}, and the model has tokens 0 "
            f"to {self._limit - 1} (Model.vocab_size)"
        )

    # ---- ids to text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of the text of a token; empty for an id outside the vocabulary, such as vocabulary
        padding."""
        return self._bytes.get(token_id, b"")

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        added = {entry["id"] for entry in self.definition.get("added_tokens") or []}
        table = {}
        for token, token_id in self._ids.items():
            value = None if token_id in added else token_to_bytes(token)
            table[token_id] = token.encode("utf-8") if value is None else value
        return table

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = False) -> str:
        """Convert token ids to text. Ids outside the vocabulary produce no text. Bytes that are not UTF-8
        become U+FFFD.
        """
        values = np.asarray(ids).tolist()
        if skip_special_tokens:
            special = self.special_ids
            values = [token_id for token_id in values if token_id not in special]
        if not self._engine.is_byte_level:
            return self._engine.decode([token_id for token_id in values if token_id in self._tokens])
        table = self._bytes
        return b"".join([table.get(token_id, b"") for token_id in values]).decode("utf-8", errors="replace")

    def stream_decoder(
        self, *, skip_special_tokens: bool = False, after: Sequence[int] = ()
    ) -> ByteStreamDecoder | TextStreamDecoder:
        """Return a decoder for ids that arrive one by one. If the ids continue a prompt, pass the prompt's
        ids as ``after``, because they can affect how the decoded text begins."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if self._engine.is_byte_level:
            return ByteStreamDecoder(self._bytes, skipped)
        return TextStreamDecoder(self.decode, self._tokens, skipped, after)


@contextmanager
def _surrogate_errors(text: str) -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} of the text is the lone surrogate U+{ord(text[error.start]):04X}, "
            "which is not text"
        ) from error


def from_section(cfg: TokenizerConfig) -> Tokenizer:
    if cfg.vocab_file is not None:
        assert cfg.merges_file is not None
        return Tokenizer.from_vocab_and_merges(cfg.vocab_file, cfg.merges_file, eod_token=cfg.eos_token)
    return Tokenizer.load(cfg.dir or cfg.tokenizer_file or "", eod_token=cfg.eos_token)


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int, *, is_trained: bool = False) -> None:
    """Raise DataError if a tokenizer has more ids than ``vocab_size``, the size of the model's vocabulary.
    Fewer ids are allowed.

    Args:
        is_trained: whether the model is trained already. Then added tokens may have larger ids, which only
            makes texts that contain them unusable. Gemma 3 has such a token, and so have models whose
            tokenizer got a padding token later.
    """
    count = tokenizer.vocab_size
    if count <= vocab_size:
        return
    if is_trained and (left_out := tokenizer.leave_out_tokens(vocab_size)):
        get_logger().warning(
            f"{tokenizer.place} has {count} token ids, and the model {vocab_size}: texts that contain "
            f"{shown(left_out[0])}{', ...' if len(left_out) > 1 else ''} are refused"
        )
        return
    raise DataError(
        f"{tokenizer.place} has {count} token ids, added tokens included, and the model {vocab_size} "
        "(Model.vocab_size). Name the tokenizer that the model was trained with (Data.tokenizer.dir); a "
        f"new model gets -o Model.vocab_size={count}"
    )


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    min_frequency: int = 2,
    special_tokens: Sequence[str] = (END_OF_DOCUMENT,),
) -> Tokenizer:
    """Train a byte-level BPE tokenizer on ``texts``, with at most ``vocab_size`` tokens. The first special
    token is the end-of-document token. A merge is learned only if its pair occurs at least ``min_frequency``
    times. The same texts always give the same tokenizer. Raises DataError if ``vocab_size`` is too small."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers, trainers

    smallest = 256 + len(special_tokens)
    if vocab_size < smallest:
        raise DataError(
            f"vocabulary of {vocab_size}: at least {smallest} tokens are needed, for 256 bytes and "
            f"{', '.join(special_tokens)}"
        )
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special_tokens),
        min_frequency=min_frequency,
        initial_alphabet=BYTE_CHARACTERS,
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    trained = [list(pair) for pair in json.loads(library.to_str())["model"]["merges"]]
    # Ids are in the order of GPT-2: bytes, merges as they were learned, special tokens.
    vocab = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
    for left, right in trained:
        vocab.setdefault(left + right, len(vocab))
    for token in special_tokens:
        vocab[token] = len(vocab)
    definition = make_definition(vocab, trained, list(special_tokens))
    return Tokenizer(definition, eod_token=special_tokens[0], place="the trained tokenizer")
