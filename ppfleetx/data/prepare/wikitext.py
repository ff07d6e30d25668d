"""Convert the WikiText benchmark (Merity et al., 2016) to token corpora of ordinary text. Headings and the
spaces before punctuation are removed, and the paragraphs below a heading become one document."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

import numpy as np

from ppfleetx.config.errors import DataError
from ppfleetx.config.message_text import counted
from ppfleetx.data.indexed_dataset import IndexedDatasetWriter, optimal_dtype, refuse_to_replace
from ppfleetx.data.tasks.evaluation import detokenizer
from ppfleetx.data.tokenizer.tokenizer import Tokenizer

SPLITS = ("train", "valid", "test")
_ENDINGS = ("tokens", "raw")


@dataclass(frozen=True)
class SplitReport:
    """The corpus written for one split of WikiText (train, valid or test). ``passages`` is its number of
    documents, and ``windows`` its number of samples."""

    split: str
    prefix: str
    passages: int
    tokens: int
    windows: int

    def __str__(self) -> str:
        passages, windows = counted(self.passages, "passage", ","), counted(self.windows, "window", ",")
        return f"{self.split}: {passages}, {self.tokens:,} tokens, {windows}: {self.prefix}"


def passages(lines: Iterator[str] | TextIO) -> Iterator[str]:
    detokenize = detokenizer("wikitext")
    paragraphs: list[str] = []
    for raw in lines:
        line = raw.strip()
        if line.startswith("=") and line.endswith("="):
            if paragraphs:
                yield " ".join(paragraphs)
            paragraphs = []
        elif line:
            paragraphs.append(detokenize(f" {line} ").strip())
    if paragraphs:
        yield " ".join(paragraphs)


def prepare_wikitext(
    source: Path, output_dir: Path, tokenizer: Tokenizer, *, length: int, overwrite: bool = False
) -> list[SplitReport]:
    """Convert WikiText to corpora ``output_dir/{train,valid,test}/wikitext.{bin,idx}``, one for each split
    that ``source`` has. ``source`` is the published zip file, or a folder with its files. ``length`` is the
    model's sequence length. Raises DataError if ``source`` is not WikiText or its train split is too short
    for one sample, or if a corpus exists and ``overwrite`` is False."""
    with _names(source) as (names, open_file):
        found = _find(source, names)
        prefixes = {split: output_dir / split / "wikitext" for split in found}
        for prefix in prefixes.values():
            refuse_to_replace(prefix, overwrite)
        return [
            _prepare(open_file(name), f"{source}: {name}", prefixes[split], tokenizer, length, split)
            for split, name in found.items()
        ]


@contextmanager
def _names(source: Path) -> Iterator[tuple[list[str], Callable[[str], IO[bytes]]]]:
    """Context manager that yields the names of the files in a folder or zip, and a function that opens one of
    them."""
    try:
        if source.is_dir():
            names = [path.name for path in source.iterdir() if path.is_file()]
            yield names, lambda name: (source / name).open("rb")
        else:
            with zipfile.ZipFile(source) as archive:
                yield archive.namelist(), archive.open
    except FileNotFoundError:
        raise DataError(f"{source}: there is no such zip or folder") from None
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError) as error:
        raise DataError(f"{source}: is neither a folder nor a zip that can be read: {error}") from error


def _prepare(
    opened: IO[bytes], place: str, prefix: Path, tokenizer: Tokenizer, length: int, split: str
) -> SplitReport:
    dtype = optimal_dtype(tokenizer.vocab_size)
    with opened as file, IndexedDatasetWriter(prefix, dtype) as writer:
        for passage in passages(_decoded(file, place)):
            ids = np.append(tokenizer.encode_to_numpy(passage), tokenizer.eod_id)
            writer.add_document(ids, [len(ids)])
        if writer.num_documents == 0:
            raise DataError(f"{place} holds no text")
        documents, tokens = writer.num_documents, writer.num_tokens
        windows = (tokens - 1) // length
        if windows == 0 and split == "train":
            raise DataError(
                f"{place}: {tokens} tokens are too few for a window of {length} + 1; read shorter ones"
            )
    return SplitReport(split, str(prefix), documents, tokens, windows)


def _find(source: Path, names: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for split in SPLITS:
        wanted = {f"wiki.{split}.{ending}" for ending in _ENDINGS}
        fitting = sorted(name for name in names if name.rpartition("/")[2] in wanted)
        if len(fitting) > 1:
            raise DataError(f"{source}: holds {' and '.join(fitting[:3])}; keep only one of them")
        if fitting:
            found[split] = fitting[0]
    if not found:
        raise DataError(f"{source}: holds no wiki.train.tokens, wiki.valid.tokens or wiki.test.tokens")
    return found


def _decoded(file: IO[bytes], place: str) -> Iterator[str]:
    try:
        yield from io.TextIOWrapper(file, encoding="utf-8", newline="\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8 text ({error.reason})") from error
