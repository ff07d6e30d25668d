"""Read text corpora as a stream of chunks for worker processes. A corpus is JSON Lines (also .gz, .zst),
plain text, or folders of such files."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ppfleetx.config.errors import DataError
from ppfleetx.data.text_files import (
    BOM,
    MAX_DOCUMENT_BYTES,
    TextFile,
    is_packed,
    load_line,
    refuse_unsupported_compression,
)
from ppfleetx.utils.input_files import os_errors

Kind = Literal["json", "line", "paragraph", "file"]

_BLANK_LINES = re.compile(rb"\r?\n(?:[ \t]*\r?\n)+")
_LEADING_BLANK_LINES = re.compile(rb"\A(?:[ \t]*\r?\n)+")
_PARAGRAPH_END = re.compile(rb"\n\r?\n")


@dataclass(frozen=True)
class _Ends:
    """Functions that find the ends of documents. ``first(data)`` and ``last(data)`` return the offset after
    the first or the last delimiter in ``data``, or 0 if there is none. ``overlap`` is the length of the
    longest delimiter minus 1: this many bytes at the end of a block are searched again with the next
    block."""

    first: Callable[[bytes], int]
    last: Callable[[bytes], int]
    overlap: int


def _first_paragraph(block: bytes) -> int:
    match = _PARAGRAPH_END.search(block)
    return match.end() if match else 0


def _last_paragraph(block: bytes) -> int:
    plain, with_return = block.rfind(b"\n\n"), block.rfind(b"\n\r\n")
    return max(plain + 2 if plain >= 0 else 0, with_return + 3 if with_return >= 0 else 0)


_LINES = _Ends(lambda block: block.find(b"\n") + 1, lambda block: block.rfind(b"\n") + 1, overlap=0)
_PARAGRAPHS = _Ends(_first_paragraph, _last_paragraph, overlap=2)


def cut_documents(blocks: Iterable[bytes], kind: Kind, max_bytes: int) -> Iterator[bytes | None]:
    """Yield the data of a file in blocks that contain only whole documents. ``blocks`` is the data in blocks
    of any size, and ``kind`` says what a document is (`Source`). Yields None in place of a document longer
    than ``max_bytes``."""
    ends = _PARAGRAPHS if kind == "paragraph" else _LINES
    pending: list[bytes] = []
    num_pending = 0
    before = b""  # end of the previous block, which may hold the start of a delimiter
    is_too_long = False
    for block in blocks:
        seen = before + block if before else block
        shift = len(before)
        before = seen[-ends.overlap :] if ends.overlap else b""
        if is_too_long:
            end = ends.first(seen)
            if not end:
                continue
            yield None
            is_too_long, block, seen, shift = False, seen[end:], seen[end:], 0
        end = max(0, ends.last(seen) - shift)
        pending.append(block[:end] if end else block)
        num_pending += len(pending[-1])
        if end:
            yield from _split_to_size(b"".join(pending), ends, max_bytes)
            pending = [block[end:]]
            num_pending = len(block) - end
        elif num_pending > max_bytes:
            is_too_long, pending, num_pending = True, [], 0
    if is_too_long:
        yield None
    elif num_pending:
        yield b"".join(pending)


def _split_to_size(piece: bytes, ends: _Ends, max_bytes: int) -> Iterator[bytes | None]:
    """Split ``piece``, which consists of whole documents, at ends of documents into blocks of at most
    ``max_bytes``. Yields None in place of a document longer than ``max_bytes``."""
    while len(piece) > max_bytes:
        end = ends.first(piece)
        yield piece[:end] if end <= max_bytes else None
        piece = piece[end:]
    if piece:
        yield piece


def paragraphs(text: bytes) -> Iterator[bytes]:
    """Yield the paragraphs of ``text``, which are separated by blank lines. Newlines at the start and end of
    a paragraph are removed."""
    # Text that was cut after one blank line can start with more blank lines.
    for paragraph in _BLANK_LINES.split(_LEADING_BLANK_LINES.sub(b"", text)):
        if paragraph.strip():
            yield paragraph.strip(b"\r\n")


CHUNK_BYTES = 2 << 20
MOST_SKIPPED = 300_000
"""Maximum number of documents without text at the start of a corpus. After more, reading stops, because the
key is probably wrong."""


@dataclass(frozen=True)
class Source:
    """One file of a text corpus. ``kind`` says what a document is in this file: a JSON line, a line, a
    paragraph between blank lines, or the whole file."""

    path: Path
    kind: Kind
    num_bytes: int


@dataclass(frozen=True)
class Chunk:
    """A part of a text corpus that one worker process encodes at a time.

    Attributes:
        paths: the files that contain the documents.
        data: the text of the documents. None if the worker reads ``paths`` itself. Also None if the chunk
            is a single document that is too long and is skipped.
        num_disk_bytes: size of the chunk in the file on disk, for the progress bar.
    """

    kind: Kind
    paths: tuple[Path, ...]
    data: bytes | None
    num_disk_bytes: int
    max_document_bytes: int = MAX_DOCUMENT_BYTES


@os_errors(DataError)
def find_sources(
    inputs: Sequence[str | os.PathLike[str]],
    *,
    suffixes: Sequence[str] = (),
    split_on: Literal["file", "line", "blank-line"] = "file",
) -> list[Source]:
    """List the files of a corpus in the order in which they are encoded. ``inputs`` are files, folders and
    patterns of these (``data/*.jsonl``, sorted by path); ``suffixes`` limits folders to files with these
    endings. The files of a folder are sorted by path. Hidden files, hidden folders and ``__pycache__`` are
    skipped.

    ``.jsonl``, ``.ndjson`` and ``.json`` files (also ``.gz``, ``.zst``) have one JSON object per line. All
    other files are plain text, which ``split_on`` divides into documents. Raises DataError if an input does
    not exist, has an unsupported compression, or contains no files, or if there are no inputs.
    """
    sources = []
    for entry in (path for given in inputs for path in _matching(given)):
        if not entry.exists():
            raise DataError(f"no such file or folder: {entry}")
        if not entry.is_file() and not entry.is_dir():
            raise DataError(f"{entry} is neither a file nor a folder; pipes cannot be read")
        paths = [entry] if entry.is_file() else _files_below(entry, tuple(suffixes))
        if not paths:
            wanted = f" ending in {', '.join(suffixes)}" if suffixes else ""
            raise DataError(f"the folder {entry} holds no file{wanted}")
        for path in paths:
            refuse_unsupported_compression(path)
        sources += [Source(path, _kind_of(path, split_on), path.stat().st_size) for path in paths]
    if not sources:
        raise DataError("no input was given")
    return sources


def _matching(given: str | os.PathLike[str]) -> list[Path]:
    found = [] if Path(given).exists() else sorted(glob.glob(os.fspath(given), recursive=True))  # noqa: PTH207
    return [Path(path) for path in found or [given]]


def _files_below(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        wanted = [name for name in names if not name.startswith(".") and name.endswith(suffixes or ("",))]
        found += [path for path in map(Path(root).joinpath, wanted) if path.is_file()]
    return sorted(found)


def _kind_of(path: Path, split_on: str) -> Kind:
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return "json"
    return {"file": "file", "line": "line", "blank-line": "paragraph"}[split_on]


def read_chunks(sources: Sequence[Source], max_document_bytes: int = MAX_DOCUMENT_BYTES) -> Iterator[Chunk]:
    """Read a corpus in order, and yield chunks of about ``CHUNK_BYTES``. A larger document is a chunk of its
    own. Raises DataError if a file cannot be read or is damaged."""
    chunk_bytes = min(CHUNK_BYTES, max_document_bytes)
    group: list[Source] = []
    for source in sources:
        # A compressed file may expand to far more than its size suggests, so it starts a new chunk.
        fits = _size(group) + source.num_bytes <= chunk_bytes and not is_packed(source.path)
        if group and (source.kind != "file" or not fits):
            yield _file_chunk(group, max_document_bytes)
            group = []
        if source.kind == "file":
            group.append(source)
        else:
            yield from _document_chunks(source, chunk_bytes, max_document_bytes)
    if group:
        yield _file_chunk(group, max_document_bytes)


def _size(group: list[Source]) -> int:
    return sum(source.num_bytes for source in group)


def _file_chunk(group: list[Source], max_document_bytes: int) -> Chunk:
    return Chunk("file", tuple(source.path for source in group), None, _size(group), max_document_bytes)


def _document_chunks(source: Source, chunk_bytes: int, max_document_bytes: int) -> Iterator[Chunk]:
    done = 0
    with TextFile(source.path) as file:
        blocks = iter(lambda: file.read(chunk_bytes), b"")
        for data in cut_documents(blocks, source.kind, max_document_bytes):
            yield Chunk(source.kind, (source.path,), data, file.position - done, max_document_bytes)
            done = file.position


def read_file(path: Path, max_document_bytes: int = MAX_DOCUMENT_BYTES) -> bytes | None:
    """Read a whole file, decompressed. Returns None if a compressed file expands to more than
    ``max_document_bytes``."""
    with TextFile(path) as file:
        return file.read_all(max(max_document_bytes, path.stat().st_size))


def documents_of(chunk: Chunk) -> Iterator[bytes | None]:
    """Split a chunk into its documents, as bytes: lines (also empty ones), paragraphs or files. Yields None
    in place of a document longer than the chunk's ``max_document_bytes``. This limit does not apply to an
    uncompressed file that is one document."""
    if chunk.kind == "file":
        for path in chunk.paths:
            content = read_file(path, chunk.max_document_bytes)
            yield None if content is None else content.removeprefix(BOM)
    elif chunk.data is None:
        yield None
    elif chunk.kind == "paragraph":
        yield from paragraphs(chunk.data.removeprefix(BOM))
    else:
        lines = chunk.data.removeprefix(BOM).split(b"\n")
        if not lines[-1]:
            lines.pop()
        for line in lines:
            yield line.removesuffix(b"\r")


_FORMATS = {
    b"PAR1": "a Parquet file; write its texts as JSON Lines, for example with pandas.read_parquet(FILE)"
    '.to_json("FILE.jsonl", orient="records", lines=True)',
    b"ARROW1": "an Arrow file; write its texts as JSON Lines",
    b"\x1f\x8b": "compressed with gzip; its name must end in .gz",
    b"\x28\xb5\x2f\xfd": "compressed with zstandard; its name must end in .zst",
    b"\xff\xfe": "in UTF-16; files must be in UTF-8",
    b"\xfe\xff": "in UTF-16; files must be in UTF-8",
}


def why_without_text(sources: Sequence[Source]) -> str:
    """Return a sentence about the format of the first source of a corpus in which no text was found, for an
    error message. The result is empty if the format is not known."""
    first = sources[0]
    with TextFile(first.path) as file:
        begin = file.read(64)
    found = next((name for magic, name in _FORMATS.items() if begin.startswith(magic)), None)
    if found is None and first.kind == "json" and begin.removeprefix(BOM).lstrip().startswith(b"["):
        found = "a JSON array; a document must be a line, as `jq -c '.[]' FILE.json > FILE.jsonl` writes it"
    return "" if found is None else f"{first.path} is {found}"


def iterate_texts(sources: Sequence[Source], key: str = "text") -> Iterator[str]:
    """Yield the texts of a corpus, one per document. In JSON documents, the text is in the field ``key``.
    Invalid documents are skipped. Raises DataError if a file is damaged, or if there is no text."""
    is_empty, num_skipped = True, 0
    for chunk in read_chunks(sources):
        for document in documents_of(chunk):
            text = _text_of(document, chunk.kind, key)
            if text:
                is_empty = False
                yield text
            else:
                num_skipped += 1
        if is_empty and num_skipped > MOST_SKIPPED:
            break
    if is_empty:
        names = ", ".join(str(source.path) for source in sources[:3]) + (", ..." if len(sources) > 3 else "")
        under = f" under the key {key!r}" if any(source.kind == "json" for source in sources) else ""
        why = why_without_text(sources)
        raise DataError(f"{names}: there is no text{under}" + (f". {why}" if why else ""))


def _text_of(document: bytes | None, kind: Kind, key: str) -> str | None:
    if not document:
        return None
    try:
        text = load_line(document).get(key) if kind == "json" else document.decode("utf-8")
    except (ValueError, AttributeError):
        return None
    return text if isinstance(text, str) else None
