"""Training data as Python programs have it, as a tokenised corpus on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppfleetx.config.errors import DataError
from ppfleetx.data.indexed import IndexedDatasetWriter, idx_path, optimal_dtype
from ppfleetx.data.prepare.corpus import find_sources, iterate_texts

if TYPE_CHECKING:
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer

TEXT_COLUMN = "text"


def corpus_prefix(data: Any, tokenizer: Tokenizer | None, directory: Path) -> str:
    """The prefix of a ``.bin/.idx`` pair with ``data``, which is made in ``directory`` where there is none.

    The name is made of the contents, so that a run that resumes finds the same corpus.

    Args:
        data: the prefix of a pair, a text file or a folder of them (json lines too), a list of texts, or
            records with a text under ``text``, such as a ``datasets.Dataset``.
        tokenizer: encodes the texts; each document ends in its end-of-document token.
        directory: where a corpus is written.

    Raises:
        DataError: there is no such file, no text in it, or no tokenizer.
    """
    if isinstance(data, str | os.PathLike) and Path(idx_path(os.fspath(data))).is_file():
        return os.fspath(data)
    if tokenizer is None:
        raise DataError("texts need a tokenizer: Trainer(..., tokenizer=DIR), or Data.tokenizer.dir")
    if isinstance(data, Iterator):
        data = list(data)  # it is read twice
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    for text in texts_of(data):
        digest.update(len(text).to_bytes(8, "little") + text.encode("utf-8", "surrogatepass"))
    prefix = directory / f"texts-{digest.hexdigest()[:16]}"
    if not Path(idx_path(str(prefix))).is_file():
        _write(prefix, texts_of(data), tokenizer)
    return str(prefix)


def texts_of(data: Any) -> Iterator[str]:
    """The texts in ``data``, which are not empty.

    Raises:
        DataError: there are none, or something is no text.
    """
    found = False
    for text in _entries(data):
        found = True
        yield text
    if not found:
        raise DataError("the training data hold no text")


def _entries(data: Any) -> Iterator[str]:
    if isinstance(data, str | os.PathLike):
        yield from iterate_texts(find_sources([data]), TEXT_COLUMN)
        return
    if not isinstance(data, Iterable):
        raise DataError(f"training data are a list of texts, a file, a prefix or a data set, not {data!r}")
    for number, entry in enumerate(data):
        text = entry.get(TEXT_COLUMN) if isinstance(entry, dict) else entry
        if not isinstance(text, str):
            raise DataError(f"entry {number} of the training data is neither a text nor has one under 'text'")
        if text:
            yield text


def _write(prefix: Path, texts: Iterable[str], tokenizer: Tokenizer) -> None:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedDatasetWriter(prefix, optimal_dtype(tokenizer.vocab_size)) as writer:
        for text in texts:
            ids = [*tokenizer.encode(text), tokenizer.eod_id]
            writer.add_document(ids, [len(ids)])
