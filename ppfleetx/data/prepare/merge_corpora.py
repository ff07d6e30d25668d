"""Merge several tokenized corpora into one, and summarize a corpus."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ppfleetx.config.errors import DataError
from ppfleetx.config.message_text import counted
from ppfleetx.data.checksums import BLOCK_BYTES, read_checksums
from ppfleetx.data.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetWriter,
    TokenStore,
    bin_path,
    refuse_to_replace,
)
from ppfleetx.data.tokenized_corpus import open_tokens
from ppfleetx.utils.input_files import opened
from ppfleetx.utils.progress_bar import ProgressBar


def merge(
    prefixes: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str], *, overwrite: bool = False
) -> None:
    """Concatenate the corpora ``prefixes`` into a new corpus ``out``. Raises DataError if an input is missing
    or damaged, if dtypes differ, if ``out`` is one of the inputs, or if ``out`` exists and ``overwrite`` is
    False."""
    prefixes = [os.fspath(prefix) for prefix in prefixes]
    if not prefixes:
        raise DataError(f"nothing to merge into {os.fspath(out)}")
    if any(bin_path(prefix).resolve() == bin_path(out).resolve() for prefix in prefixes):
        raise DataError(f"{os.fspath(out)} is both input and output of the merge")
    refuse_to_replace(out, overwrite)
    total = sum(bin_path(prefix).stat().st_size for prefix in prefixes if bin_path(prefix).is_file())
    with (
        IndexedDatasetWriter(out, IndexedDataset(prefixes[0]).dtype) as writer,
        ProgressBar("merging", total=total / 1e6, unit="MB") as bar,
    ):
        for prefix in prefixes:
            other = IndexedDataset(prefix)
            if other.dtype != writer.dtype:
                raise DataError(f"{prefix} stores {other.dtype}, {prefixes[0]} stores {writer.dtype}")
            writer.add_index(other, _verified_blocks(other.prefix, bar))


def _verified_blocks(prefix: str, bar: ProgressBar) -> Iterator[bytes]:
    """Yield the ``.bin`` file of a corpus block by block, and advance the progress bar. Raises DataError if
    the corpus does not match its checksums."""
    checksums = read_checksums(prefix)
    if checksums is None:
        with opened(bin_path(prefix), DataError) as file:
            while data := file.read(BLOCK_BYTES):
                yield data
                bar.advance(len(data) / 1e6)
        return
    checksums.check_sizes()
    for damage in checksums.damage((".idx",)):
        raise DataError(str(damage))
    for data, damage in checksums.blocks(".bin"):
        if damage is not None:
            raise DataError(f"{damage}; ppfleetx inspect-data {prefix} --verify names the documents")
        yield data
        bar.advance(len(data) / 1e6)


_CHUNK = 1 << 22  # tokens read at a time


def summary(prefix: str) -> dict[str, Any]:
    """Return the main figures of a corpus, such as its numbers of documents and tokens, in types that JSON
    can represent. Raises DataError."""
    corpus = open_tokens(prefix)
    sizes = corpus.sizes
    return {
        "prefix": corpus.prefix,
        "documents": corpus.document_indices.shape[0] - 1,
        "sequences": len(corpus),
        "tokens": corpus.num_tokens,
        "dtype": str(corpus.dtype),
        "shortest_sequence": int(sizes.min()) if len(corpus) else 0,
        "longest_sequence": int(sizes.max()) if len(corpus) else 0,
        "largest_id": largest_id(corpus),
        "fingerprint": corpus.fingerprint,
        "has_checksums": read_checksums(corpus.prefix) is not None,
    }


def largest_id(corpus: TokenStore) -> int:
    chunks = range(0, corpus.num_tokens, _CHUNK)
    return int(max((np.max(corpus.flat(first, first + _CHUNK)) for first in chunks), default=-1))


def summary_text(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['prefix']}: {counted(facts['documents'], 'document', ',')}, "
        f"{counted(facts['sequences'], 'sequence', ',')}, {counted(facts['tokens'], 'token', ',')} "
        f"({facts['dtype']})",
        f"sequences of {facts['shortest_sequence']:,} to {counted(facts['longest_sequence'], 'token', ',')}, "
        f"ids up to {facts['largest_id']:,}",
        f"fingerprint {facts['fingerprint']}",
        "it has checksums; --verify compares them"
        if facts["has_checksums"]
        else "it has no checksums; --write-checksums makes them",
    ]
    return "\n".join(lines)
