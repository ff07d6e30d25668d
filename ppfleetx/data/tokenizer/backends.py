"""The two libraries that encode text for a tokenizer: the faster ``tiktoken`` if it gives the same ids, else
``tokenizers``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from ppfleetx.config.errors import DataError
from ppfleetx.data.tokenizer.json_files import END_OF_DOCUMENT, merge_pairs, token_to_bytes
from ppfleetx.utils.log import get_logger


def live_ranks(merges: Sequence[tuple[bytes, bytes]]) -> dict[bytes, int] | None:
    """Return tiktoken's ranks, {token: rank}, for the tokens that ``merges`` produce. A token's rank is the
    index of the merge that produces it. A token is left out if its own bytes are encoded as several tokens,
    because it then occurs in no text. Returns None if a merge is listed before the merge that produces one of
    its halves, because tiktoken cannot reproduce that."""
    # Byte-level BPE joins neighbors x and y only if the pair (x, y) is listed. tiktoken joins them whenever
    # the bytes of x + y are a token. Both give the same ids if each token, encoded alone by the merges, stays
    # one token. Proof: suppose tiktoken joins x and y to T, and (x, y) is not listed. No merge has crossed
    # the ends of x + y so far. So in the bytes of T alone, the merges take the same steps, reach (x, y) and
    # stop. By the same argument, a token that the merges do not produce from its own bytes cannot occur in
    # any text, and is left out here.
    rank: dict[bytes, int] = {}
    halves: dict[bytes, tuple[bytes, bytes]] = {}
    pair_rank: dict[tuple[bytes, bytes], int] = {}
    waiting: set[bytes] = set()
    for index, (left, right) in enumerate(merges):
        unmade = [half for half in (left, right) if len(half) > 1 and half not in rank]
        if unmade:
            waiting.update(unmade)
            continue
        token = left + right
        if token in rank or _is_crossed(left, right, index, rank, halves, pair_rank):
            continue
        if token in waiting:
            return None  # a pair was listed before the merge that makes one of its halves
        rank[token] = index
        halves[token] = (left, right)
        pair_rank[left, right] = index
    return rank


def _is_crossed(
    left: bytes,
    right: bytes,
    own_rank: int,
    rank: dict[bytes, int],
    halves: dict[bytes, tuple[bytes, bytes]],
    pair_rank: dict[tuple[bytes, bytes], int],
) -> bool:
    """Return whether earlier merges prevent the merge of the tokens ``left`` and ``right``. They do if,
    applied to the bytes ``left + right``, they make a token that crosses the boundary between the two.

    Args:
        own_rank: the rank of the merge of ``left`` and ``right``.
        rank: the ranks of the tokens that earlier merges make.
        halves: for each of these tokens, the two tokens that it is made from.
        pair_rank: the rank of each earlier merge, by the two tokens that it joins.
    """
    # Undo merges, the latest first. `left` and `right` are then the tokens at the boundary, and `left_end`
    # and `right_end` are the ranks of the merges that consumed them. Merges of equal rank apply from left to
    # right. So at equal rank, a merge that consumes the left token comes before the crossing merge, and a
    # merge that consumes the right token comes after it.
    left_end = right_end = own_rank
    while True:
        crossing = pair_rank.get((left, right))
        if crossing is not None and crossing < left_end and crossing <= right_end:
            return True
        left_made, right_made = rank.get(left, -1), rank.get(right, -1)
        if left_made < 0 and right_made < 0:
            return False
        if right_made >= left_made:
            right_end = right_made
            right = halves[right][0]
        else:
            left_end = left_made
            left = halves[left][1]


def split_by_ranks(text: bytes, rank: dict[bytes, int]) -> list[bytes]:
    """Split ``text`` into tokens as tiktoken does. Starting from single bytes, join the two neighbors whose
    concatenation has the lowest ``rank`` (the leftmost on ties), until no concatenation has a rank."""
    parts = [text[i : i + 1] for i in range(len(text))]
    never = len(rank) + max(rank.values(), default=0) + 1
    while len(parts) > 1:
        ranks = [rank.get(left + right, never) for left, right in pairwise(parts)]
        first = min(range(len(ranks)), key=ranks.__getitem__)
        if ranks[first] == never:
            break
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts


# The pattern of ByteLevel(use_regex=True) is 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+|
# ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ . It is rewritten here to reduce tiktoken's backtracking. White space is
# matched as a run at the end of the text, else as a run without its last character, else as that character.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+$|\s+(?!\S)|\s"
_WHOLE_TEXT = r"(?s:.+)"
# Patterns of the pre-tokenizer Split that match the same in both libraries and cover the whole text.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
# tiktoken's regular expressions push a stack entry for each character that `\s+(?!\S)` matches. The stack
# holds at most a million entries.
_LONG_RUN = 100_000
_WHITE_SPACE = re.compile(r"\s+")
_WARNED: set[str] = set()  # why tiktoken could not be used, of the tokenizers that build_engine warned of


class Unsupported(Exception):  # noqa: N818 - control flow between the two engines, never shown as an error
    """Raised if tiktoken cannot reproduce the ids of a tokenizer. The message says why."""


def build_engine(definition: dict[str, Any], place: str) -> TiktokenEngine | TokenizersEngine:
    """Choose the library that encodes text for a tokenizer. Returns tiktoken's engine if it gives the same
    ids, else the engine of the slower ``tokenizers``, with a warning. ``definition`` is the content of
    ``tokenizer.json``."""
    try:
        return TiktokenEngine(definition, place)
    except Unsupported as reason:
        # A command often opens copies of one tokenizer, a checkpoint's and the run's: one warning is enough.
        cause = f"{reason} {json.dumps(definition.get('pre_tokenizer'), sort_keys=True)}"
        if cause not in _WARNED:
            _WARNED.add(cause)
            get_logger().warning(
                "%s: %s, so it is encoded with the tokenizers library, several times slower", place, reason
            )
        return TokenizersEngine(definition, place)


class TokenizersEngine:
    """Encodes text with any tokenizer, through Hugging Face ``tokenizers``."""

    name = "tokenizers"

    def __init__(self, definition: dict[str, Any], place: str = "the tokenizer") -> None:
        self._definition, self._place = definition, place
        self._made: dict[tuple[bool, bool], Any] = {}
        self.is_byte_level = (definition.get("decoder") or {}).get("type") == "ByteLevel"
        self._library(special=False, continues=False)

    def _library(self, *, special: bool, continues: bool) -> Any:
        if (special, continues) not in self._made:
            import tokenizers

            definition = without_prefix(self._definition) if continues else self._definition
            with _library_errors(f"{self._place} is damaged or of an unknown kind"):
                library = tokenizers.Tokenizer.from_str(json.dumps(definition))
            library.encode_special_tokens = not special
            library.no_padding()
            library.no_truncation()
            self._made[special, continues] = library
        return self._made[special, continues]

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each token of the vocabulary, including added tokens."""
        return self._library(special=False, continues=False).get_vocab(with_added_tokens=True)

    def identity(self, definition: dict[str, Any]) -> Any:
        """Return the entries of a ``tokenizer.json`` that determine how text is converted to ids, for the
        tokenizer's fingerprint. ``definition`` is the content of the file."""
        kept = ("added_tokens", "normalizer", "pre_tokenizer", "model", "decoder")
        return {key: definition.get(key) for key in kept}

    def encode(self, text: str, *, special: bool = False, continues: bool = False) -> np.ndarray:
        """Encode ``text`` to token ids. With ``special``, special tokens in the text become their ids. With
        ``continues``, no space is added before the text. Raises UnicodeEncodeError for a lone surrogate."""
        text.encode("utf-8")  # tokenizers' own error for a lone surrogate is unclear
        library = self._library(special=special, continues=continues)
        with _library_errors(f"{self._place} cannot encode a text"):
            return np.array(library.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_marked(
        self, text: str, spans: Sequence[tuple[int, int]], *, special: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode ``text``, and mark the tokens in ``spans``, ranges ``[start, end)`` of characters. Returns
        the ids, int64 [n], and a mask, bool [n], that is True for tokens with characters in a span."""
        text.encode("utf-8")
        with _library_errors(f"{self._place} cannot encode a text"):
            made = self._library(special=special, continues=False).encode(text, add_special_tokens=False)
        marked = np.zeros(len(made.ids), dtype=bool)
        for start, end in spans:
            # Some characters have no token, such as stripped spaces.
            tokens = [one for place in range(start, end) if (one := made.char_to_token(place)) is not None]
            if tokens:
                marked[tokens[0] : tokens[-1] + 1] = True
        return np.array(made.ids, dtype=np.int64), marked

    def decode(self, ids: list[int]) -> str:
        return self._library(special=False, continues=False).decode(ids, skip_special_tokens=False)


def without_prefix(definition: dict[str, Any]) -> dict[str, Any]:
    def changed(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        kind = part.get("type")
        if kind == "Sequence":
            key = "normalizers" if "normalizers" in part else "pretokenizers"
            kept = [one for one in part.get(key, []) if one.get("type") != "Prepend"]
            return part | {key: [changed(one) for one in kept]}
        if kind == "Prepend":
            return None
        off = {"prepend_scheme": "never", "add_prefix_space": False}
        return part | {key: value for key, value in off.items() if key in part}

    parts = {key: changed(definition.get(key)) for key in ("normalizer", "pre_tokenizer")}
    return definition | parts


@contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """Context manager that converts the errors of ``tokenizers``, which are plain Exceptions or Rust panics,
    into DataError.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {error}") from error


class TiktokenEngine:
    """Encodes text with a byte-level BPE tokenizer, through tiktoken. Raises Unsupported if the tokenizer is
    of another kind, or if tiktoken would give other ids.
    """

    name = "tiktoken"
    is_byte_level = True

    def __init__(self, definition: dict[str, Any], place: str = "the tokenizer") -> None:
        import tiktoken

        self._definition, self._place = definition, place
        model = definition["model"]
        _check_model(definition, model)
        self._pattern, self._prefix_space = _pre_tokenizer(definition.get("pre_tokenizer"))
        ranks, self._id_of_rank = _ranks_and_ids(model)
        self._encoding = tiktoken.Encoding(
            "ppfleetx",
            pat_str=self._pattern,
            mergeable_ranks=ranks,
            # Without special tokens, encode_to_numpy is half as fast. This one never matches a text.
            special_tokens={END_OF_DOCUMENT: max(ranks.values()) + 1},
        )
        self._special = [added["content"] for added in definition.get("added_tokens") or []]

    @cached_property
    def _exact(self) -> TokenizersEngine:
        return TokenizersEngine(self._definition, self._place)

    @cached_property
    def ids(self) -> dict[str, int]:
        added = {entry["content"]: entry["id"] for entry in self._definition.get("added_tokens") or []}
        return self._definition["model"]["vocab"] | added

    def identity(self, definition: dict[str, Any]) -> Any:
        model, added = definition["model"], definition.get("added_tokens") or []
        ids = model["vocab"] | {entry["content"]: entry["id"] for entry in added}
        return {
            "vocab": sorted(ids.items(), key=lambda item: item[1]),
            "merges": [" ".join(pair) for pair in merge_pairs(model)],
            "special": sorted(entry["content"] for entry in added),
            "pattern": self._pattern,
            "prefix_space": self._prefix_space,
            "ignore_merges": bool(model.get("ignore_merges")),
        }

    def encode(self, text: str, *, special: bool = False, continues: bool = False) -> np.ndarray:
        special = special and any(token in text for token in self._special)
        if special or _has_long_run(text):
            return self._exact.encode(text, special=special, continues=continues)
        if self._prefix_space and not continues and text and not text.startswith(" "):
            text = " " + text
        ranks = self._encoding.encode_to_numpy(text, disallowed_special=())
        return ranks if self._id_of_rank is None else self._id_of_rank[ranks]

    def encode_marked(
        self, text: str, spans: Sequence[tuple[int, int]], *, special: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        return self._exact.encode_marked(text, spans, special=special)  # tiktoken has no character offsets


def _has_long_run(text: str) -> bool:
    if len(text) < _LONG_RUN:
        return False
    return any(run.end() - run.start() >= _LONG_RUN for run in _WHITE_SPACE.finditer(text))


def _check_model(definition: dict[str, Any], model: dict[str, Any]) -> None:
    if model["type"] != "BPE":
        raise Unsupported(f"its model is {model['type']}, not byte-level BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise Unsupported(f"its model has {key} = {model[key]!r}")
    normalizer = definition.get("normalizer")
    if normalizer and normalizer.get("normalizers") != []:
        raise Unsupported(f"it has a normalizer ({normalizer.get('type')})")
    plain = [added["content"] for added in definition.get("added_tokens") or [] if not added.get("special")]
    if plain:
        raise Unsupported(f"it has added tokens that are not special, such as {plain[0]!r}")


def _pre_tokenizer(described: dict[str, Any] | None) -> tuple[str, bool]:
    """Return the regular expression by which a pre-tokenizer splits text, and whether it adds a space before
    the text. ``described`` is the entry ``pre_tokenizer`` of a ``tokenizer.json``. Raises Unsupported if
    tiktoken cannot do the same."""
    steps = [described] if described else []
    if described and described.get("type") == "Sequence":
        steps = described.get("pretokenizers")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise Unsupported("its pre-tokenizer is not a sequence of steps")
    if not steps or steps[-1].get("type") != "ByteLevel":
        raise Unsupported("its pre-tokenizer does not end in ByteLevel")
    prefix_space, use_regex = steps[-1].get("add_prefix_space", True), steps[-1].get("use_regex", True)
    if len(steps) == 1:
        return (GPT2_PATTERN if use_regex else _WHOLE_TEXT), prefix_space
    split = {"invert": False, **steps[0]}
    pattern = (split.get("pattern") or {}).get("Regex")
    known = {"type": "Split", "pattern": {"Regex": pattern}, "invert": False, "behavior": "Isolated"}
    is_known = split == known and pattern in (LLAMA3_PATTERN, QWEN2_PATTERN)
    if len(steps) > 2 or use_regex or prefix_space or not is_known:
        raise Unsupported("its pre-tokenizer is not ByteLevel, alone or after one Split by a known pattern")
    return pattern, False


def _ranks_and_ids(model: dict[str, Any]) -> tuple[dict[bytes, int], np.ndarray | None]:
    """Return tiktoken's rank of each token, and an array with the id of each rank. The array is None if the
    ranks are the ids. ``model`` is the ``model`` entry of a ``tokenizer.json``. Raises Unsupported if the
    vocabulary lacks a byte, or if ranks cannot express the merges."""
    vocab: dict[str, int] = model["vocab"]
    id_of = {token_to_bytes(token): token_id for token, token_id in vocab.items()}
    id_of.pop(None, None)
    singles = [bytes([byte]) for byte in range(256)]
    if any(single not in id_of for single in singles):
        raise Unsupported("its vocabulary does not have all 256 bytes")
    merges = [(token_to_bytes(left), token_to_bytes(right)) for left, right in merge_pairs(model)]
    if any(left is None or right is None for left, right in merges):
        raise Unsupported("its merges are not written in the byte alphabet")
    live = live_ranks(merges)
    if live is None:
        raise Unsupported("its merges are not in the order in which tokens are built")
    tokens = [*singles, *live]
    if model.get("ignore_merges"):
        tokens += _whole_piece_tokens(id_of, live)
    ids = np.array([id_of[token] for token in tokens], dtype=np.int64)
    if (np.diff(ids[len(singles) : len(singles) + len(live)]) > 0).all():
        return {token: id_of[token] for token in tokens}, None
    return {token: rank for rank, token in enumerate(tokens)}, ids


def _whole_piece_tokens(id_of: dict[bytes, int], live: dict[bytes, int]) -> list[bytes]:
    """Return the tokens of the vocabulary ``id_of`` that can only stand for a whole piece (word) of the split
    text: no merge produces them, and they are not single bytes. ``live`` has the tokens that merges produce
    (`live_ranks`). Raises Unsupported if tiktoken would make a returned token by joining two others."""
    # With ignore_merges, such a token is used only if it equals a whole piece (word) of the split text.
    extra = [token for token in id_of if len(token) > 1 and token not in live]
    for token in extra:
        if len(split_by_ranks(token, live)) == 2:
            raise Unsupported(f"its token {token!r} is made by no merge, though its halves are tokens")
    return extra
