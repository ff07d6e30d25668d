"""The work of a preprocessing worker: encode the documents of a chunk to flat token arrays."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ppfleetx.config.errors import DataError
from ppfleetx.data.prepare.corpus import MAX_SKIPPED_IN_A_ROW, Chunk, documents_of
from ppfleetx.data.text_files import load_line
from ppfleetx.data.tokenizer.tokenizer import Tokenizer

_PLACES_KEPT = 5  # of each kind of problem; all are counted
_UNITS = {"json": "line", "line": "line", "paragraph": "paragraph"}


@dataclass
class ChunkResult:
    """The tokens of a chunk as bytes, which are cheap to send between processes.

    Attributes:
        tokens, lengths: for each key, the tokens of all documents in the dtype of the output, and the number
            of tokens of each, int32.
        num_seen: the number of lines, paragraphs or files read.
        skipped, places: for each kind of problem, how often it occurred, and the positions of its first
            occurrences (0 is the chunk's first document).
    """

    tokens: dict[str, bytes] = field(default_factory=dict)
    lengths: dict[str, bytes] = field(default_factory=dict)
    num_documents: int = 0
    num_text_bytes: int = 0
    num_seen: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[int]] = field(default_factory=dict)

    def skip(self, problem: str) -> None:
        self.skipped[problem] += 1
        places = self.places.setdefault(problem, [])
        if len(places) < _PLACES_KEPT:
            places.append(self.num_seen)

    def arrays(self, dtype: np.dtype) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        return {
            key: (np.frombuffer(self.tokens[key], dtype), np.frombuffer(self.lengths[key], np.int32))
            for key in self.tokens
        }


class _Skip(Exception):  # noqa: N818 - control flow within this file
    """Raised to skip a document; the message is the kind of problem."""


class ChunkEncoder:
    """Encodes the texts under ``keys`` of a chunk's documents; called in the workers. With ``append_eod``,
    each document that has a token ends with the end-of-document token."""

    def __init__(
        self, tokenizer: Tokenizer, keys: tuple[str, ...], append_eod: bool, dtype: np.dtype
    ) -> None:
        self._tokenizer = tokenizer
        self._keys = keys
        self.dtype = dtype
        self._eod = np.array([tokenizer.eod_id], dtype) if append_eod else None

    def __call__(self, chunk: Chunk) -> ChunkResult:
        result = ChunkResult()
        parts: dict[str, list[np.ndarray]] = {key: [] for key in self._keys}
        lengths: dict[str, list[int]] = {key: [] for key in self._keys}
        for document in documents_of(chunk):
            if document == b"":  # a file may contain nothing else
                result.skip("empty")
                result.num_seen += 1
                continue
            try:
                if document is None:
                    raise _Skip(f"longer than {chunk.max_document_bytes / 1e6:g} MB (--max-document-mb)")
                texts = self._texts(document, is_json=chunk.kind == "json")
                encoded = [self._encode(text) for text in texts]
            except _Skip as problem:
                result.skip(str(problem))
            else:
                for key, ids in zip(self._keys, encoded, strict=True):
                    has_end = self._eod is not None and len(ids) > 0
                    parts[key] += [ids, self._eod] if has_end else [ids]
                    lengths[key].append(len(ids) + has_end)
                result.num_documents += 1
                result.num_text_bytes += sum(map(_num_bytes, texts))
            result.num_seen += 1
        for key in self._keys:
            flat = np.concatenate(parts[key]) if parts[key] else np.empty(0)
            result.tokens[key] = flat.astype(self.dtype).tobytes()
            result.lengths[key] = np.array(lengths[key], np.int32).tobytes()
        return result

    def _texts(self, document: bytes, is_json: bool) -> list[str]:
        try:
            texts = _json_texts(document, self._keys) if is_json else [document.decode("utf-8")]
        except UnicodeDecodeError:
            raise _Skip("not UTF-8") from None
        if not any(texts):
            raise _Skip("empty")
        return texts

    def _encode(self, text: str) -> np.ndarray:
        try:
            return self._tokenizer.encode_to_numpy(text)
        except DataError:
            raise _Skip("holds half a surrogate pair") from None


def _json_texts(line: bytes, keys: tuple[str, ...]) -> list[str]:
    if not line or line.isspace():
        raise _Skip("empty")
    try:
        record = load_line(line)
    except UnicodeDecodeError:
        raise
    except ValueError:
        raise _Skip("not JSON") from None
    if not isinstance(record, dict):
        raise _Skip("not a JSON object")
    texts = []
    for key in keys:
        if key not in record:
            raise _Skip(f"no key {key!r}")
        if not isinstance(record[key], str):
            raise _Skip(f"the value of {key!r} is not a string")
        texts.append(record[key])
    return texts


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))


class Problems:
    """The documents that were skipped: how many, and the places of the first few."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.places: dict[str, list[str]] = {}
        self._path: Path | None = None
        self._num_seen = 0  # of this file
        self._num_skipped = 0  # of these problems, since the last good document

    @property
    def total(self) -> int:
        return self.counts.total()

    def add(self, chunk: Chunk, result: ChunkResult, strict: bool) -> None:
        """Add the problems of a chunk; chunks come in the order of the corpus. Raises DataError if ``strict``
        is set, or if there are so many in a row that the file must be of another kind."""
        if self._path != chunk.paths[0]:
            self._path, self._num_seen, self._num_skipped = chunk.paths[0], 0, 0
        self.counts += result.skipped
        for problem, positions in result.places.items():
            places = self.places.setdefault(problem, [])
            found = [self._place(chunk, position) for position in positions]
            if strict:
                raise DataError(f"{found[0]}: {problem}")
            places += found[: _PLACES_KEPT - len(places)]
        self._num_seen += result.num_seen
        self._num_skipped = 0 if result.num_documents else self._num_skipped + result.num_seen
        if self._num_skipped > MAX_SKIPPED_IN_A_ROW and chunk.kind != "file":
            which = "first" if self._num_skipped == self._num_seen else "last"
            count = f"{which} {self._num_skipped:,} {_UNITS[chunk.kind]}s"
            raise DataError(f"{self._path}: none of its {count} is a document: {'; '.join(self.lines())}")

    def _place(self, chunk: Chunk, position: int) -> str:
        if chunk.kind == "file":
            return str(chunk.paths[position])
        return f"{chunk.paths[0]}, {_UNITS[chunk.kind]} {self._num_seen + position + 1}"

    def lines(self) -> list[str]:
        """Describe each kind of problem in one line, the most frequent first."""
        lines = []
        for problem, count in self.counts.most_common():
            more = ["..."] if count > _PLACES_KEPT else []
            lines.append(f"{count:,} {problem} ({'; '.join(self.places[problem] + more)})")
        return lines
