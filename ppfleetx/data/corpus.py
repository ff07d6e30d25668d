"""Text corpora on disk as a stream of chunks: json lines (.gz, .zst too), plain text, folders of text."""

from __future__ import annotations

import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from ppfleetx.config.errors import DataError

CHUNK_BYTES = 2 << 20
Kind = Literal["json", "line", "paragraph", "file"]
_BLANK_LINES = re.compile(rb"\r?\n(?:[ \t]*\r?\n)+")
_LEADING_BLANK_LINES = re.compile(rb"\A(?:[ \t]*\r?\n)+")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Source:
    """One file of the corpus.

    Attributes:
        path: the file.
        kind: what one document is: a json line, a line, what lies between blank lines, or the whole file.
        num_bytes: size on disk.
    """

    path: Path
    kind: Kind
    num_bytes: int


@dataclass(frozen=True)
class Chunk:
    """A piece of the corpus that one worker handles: whole documents of one file, or several whole files.

    Attributes:
        kind: as of `Source`.
        paths: the file the data are from, or the files to read.
        data: bytes of whole documents; None for kind "file".
        num_disk_bytes: how much of the files on disk this is (compressed, if they are); for the progress bar.
    """

    kind: Kind
    paths: tuple[Path, ...]
    data: bytes | None
    num_disk_bytes: int


def find_sources(
    inputs: Sequence[str | os.PathLike[str]],
    *,
    suffixes: Sequence[str] = (),
    split_on: Literal["file", "line", "blank-line"] = "file",
) -> list[Source]:
    """The files of a corpus in the order they will be written; those of a folder sorted by path.

    ``.jsonl`` and ``.json`` files (``.gz``, ``.zst`` behind that allowed) hold one json object a line; every
    other file is plain text. Hidden files, hidden folders and ``__pycache__`` are passed over.

    Args:
        inputs: files and folders.
        suffixes: in folders take only files whose name ends in one of these.
        split_on: what one document of a plain text file is.

    Raises:
        DataError: an input does not exist, or there is no file at all.
    """
    sources = []
    for entry in map(Path, inputs):
        if not entry.exists():
            raise DataError(f"no such file or folder: {entry}")
        if not entry.is_file() and not entry.is_dir():
            raise DataError(f"{entry} is neither a file nor a folder; pipes cannot be read")
        paths = [entry] if entry.is_file() else _files_below(entry, tuple(suffixes))
        if not paths:
            wanted = f" ending in {', '.join(suffixes)}" if suffixes else ""
            raise DataError(f"the folder {entry} holds no file{wanted}")
        sources += [Source(path, _kind_of(path, split_on), path.stat().st_size) for path in paths]
    if not sources:
        raise DataError("no input was given")
    return sources


def _files_below(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        wanted = [name for name in names if not name.startswith(".") and name.endswith(suffixes or ("",))]
        found += [path for path in map(Path(root).joinpath, wanted) if path.is_file()]
    return sorted(found)


def _kind_of(path: Path, split_on: str) -> Kind:
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if name.endswith((".jsonl", ".json")):
        return "json"
    return {"file": "file", "line": "line", "blank-line": "paragraph"}[split_on]


def read_chunks(sources: Sequence[Source], chunk_bytes: int | None = None) -> Iterator[Chunk]:
    """The corpus in order, in chunks of about ``chunk_bytes``; a document larger than that is one chunk.

    Raises:
        DataError: a file cannot be read, or is damaged.
    """
    chunk_bytes = CHUNK_BYTES if chunk_bytes is None else chunk_bytes
    group: list[Source] = []
    for source in sources:
        if group and (source.kind != "file" or _size(group) + source.num_bytes > chunk_bytes):
            yield _file_chunk(group)
            group = []
        if source.kind == "file":
            group.append(source)
        else:
            yield from _document_chunks(source, chunk_bytes)
    if group:
        yield _file_chunk(group)


def _size(group: list[Source]) -> int:
    return sum(source.num_bytes for source in group)


def _file_chunk(group: list[Source]) -> Chunk:
    return Chunk("file", tuple(source.path for source in group), None, _size(group))


def _document_chunks(source: Source, chunk_bytes: int) -> Iterator[Chunk]:
    """Blocks of a file, each cut behind its last whole document."""
    find_end = _end_of_last_paragraph if source.kind == "paragraph" else _end_of_last_line
    pending: list[bytes] = []
    done = 0
    with open_text(source.path) as (stream, raw):
        while block := _read(stream, source.path, chunk_bytes):
            end = find_end(block)
            if end == 0:
                pending.append(block)
                continue
            position = raw.tell()
            yield Chunk(source.kind, (source.path,), b"".join([*pending, block[:end]]), position - done)
            pending, done = [block[end:]], position
        rest = b"".join(pending)
        if rest:
            yield Chunk(source.kind, (source.path,), rest, raw.tell() - done)


def _end_of_last_line(block: bytes) -> int:
    return block.rfind(b"\n") + 1


def _end_of_last_paragraph(block: bytes) -> int:
    end = max(block.rfind(b"\n\n") + 2, block.rfind(b"\n\r\n") + 3)
    return end if end > 3 else 0


class open_text:  # noqa: N801 - used like a function
    """Context manager: (stream of the uncompressed bytes, the file beneath it)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> tuple[BinaryIO, BinaryIO]:
        try:
            self._raw = self._path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(f"cannot read {self._path}: {error.strerror}") from error
        stream: BinaryIO = self._raw
        if self._path.suffix == ".gz":
            stream = gzip.GzipFile(fileobj=self._raw)
        elif self._path.suffix == ".zst":
            import zstandard

            stream = zstandard.ZstdDecompressor().stream_reader(self._raw, read_across_frames=True)
        return stream, self._raw

    def __exit__(self, *_: object) -> None:
        self._raw.close()


def read_file(path: Path) -> bytes:
    """The whole of a file, uncompressed."""
    with open_text(path) as (stream, _):
        return _read(stream, path, -1)


def _read(stream: BinaryIO, path: Path, num_bytes: int) -> bytes:
    """Read ``num_bytes`` (-1: all), fewer only at the end of the file."""
    parts: list[bytes] = []
    missing = num_bytes
    try:
        while missing != 0:
            part = stream.read(missing if missing > 0 else io.DEFAULT_BUFFER_SIZE << 7)
            if not part:
                break
            parts.append(part)
            missing -= len(part) if num_bytes > 0 else 0
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":  # not imported unless a .zst file is read
            raise
        raise DataError(f"cannot read {path}: {error}") from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


def documents_of(chunk: Chunk) -> Iterator[bytes]:
    """Raw documents of a chunk, one for each line, paragraph or file; empty ones too."""
    if chunk.data is None:
        for path in chunk.paths:
            yield read_file(path).removeprefix(_BOM)
    elif chunk.kind == "paragraph":
        # A cut behind one blank line can leave further ones at the start of the next chunk.
        text = _LEADING_BLANK_LINES.sub(b"", chunk.data.removeprefix(_BOM))
        for paragraph in _BLANK_LINES.split(text):
            if paragraph.strip():
                yield paragraph.strip(b"\r\n")
    else:
        lines = chunk.data.removeprefix(_BOM).split(b"\n")
        if not lines[-1]:
            lines.pop()
        for line in lines:
            yield line.removesuffix(b"\r")


def iterate_texts(sources: Sequence[Source], key: str = "text") -> Iterator[str]:
    """Texts of a corpus, for training a tokenizer; what is no text (bad json, not UTF-8) is passed over."""
    import json

    for chunk in read_chunks(sources):
        for document in documents_of(chunk):
            try:
                text = document.decode("utf-8")
                text = json.loads(text).get(key) if chunk.kind == "json" and text.strip() else text
            except (ValueError, AttributeError, RecursionError):
                continue
            if isinstance(text, str) and text:
                yield text
