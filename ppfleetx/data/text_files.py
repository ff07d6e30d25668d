"""Read text files, compressed or not, as bytes, lines or JSON records. Damaged files raise DataError."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from ppfleetx.config.errors import DataError, shown
from ppfleetx.utils.input_files import opened

MAX_DOCUMENT_BYTES = 64_000_000
"""Default size limit for one document of a text corpus, in bytes."""

_PACKED = (".gz", ".zst")
_OTHER_PACKING = (".bz2", ".xz", ".lzma", ".lz4", ".br", ".zstd", ".gzip", ".zip", ".7z", ".z")
_TEXT = (".jsonl", ".json", ".txt", ".text", ".ndjson")
_PACKED_BYTES = 2048  # compressed bytes read at a time, which decompress to at most about 64 MB
_BLOCK_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"  # a byte order mark, which Windows programs write at the start of a file
_FIELDS_NAMED = 10  # fields listed in an error message


def is_packed(path: Path) -> bool:
    return path.suffix in _PACKED


def refuse_unsupported_compression(path: Path) -> None:
    """Raise DataError if the suffix of a text file names an unsupported compression, as in ``a.jsonl.xz``."""
    packed = path.suffix.lower() in (*_PACKED, *_OTHER_PACKING) and not is_packed(path)
    if packed and path.with_suffix("").suffix.lower() in _TEXT:
        raise DataError(
            f"{path} is in an unsupported compression. Unpack it, or compress it as .gz or .zst (in lower "
            "case)"
        )


class TextFile:
    """A context manager that reads the bytes of a file, decompressed if the name ends in ``.gz`` or ``.zst``.
    Raises DataError if the file cannot be read, is damaged or is truncated."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> TextFile:
        self._open = opened(self._path, DataError)
        self._raw = self._open.__enter__()
        self._is_packed = is_packed(self._path)
        self._stream = self._unpacked()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(None, None, None)

    @property
    def position(self) -> int:
        """The number of bytes of the file read so far. For a compressed file, these are compressed bytes."""
        return self._raw.tell()

    def _unpacked(self) -> BinaryIO | _ZstdFile:
        if self._path.suffix == ".gz":
            return gzip.GzipFile(fileobj=self._raw)
        if self._path.suffix == ".zst":
            return _ZstdFile(self._raw)
        return self._raw

    def read(self, num_bytes: int) -> bytes:
        parts, missing = [], num_bytes
        while missing:
            part = self._read_some(min(missing, _BLOCK_BYTES))
            if not part:
                break
            parts.append(part)
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_all(self, limit: int | None = None) -> bytes | None:
        """Return the rest of the file. Returns None if that is more than ``limit`` bytes."""
        content = io.BytesIO()
        while part := self._read_some(_BLOCK_BYTES):
            content.write(part)
            if limit is not None and content.tell() > limit:
                return None
        return content.getvalue()

    def _read_some(self, num_bytes: int) -> bytes:
        try:
            part = self._stream.read(num_bytes)
            if not part and self._is_packed and not self.position:
                raise EOFError("it is empty")
        except (OSError, EOFError, ValueError, zlib.error) as error:
            why = getattr(error, "strerror", None) or error
            raise DataError(f"{self._path} cannot be read: {why}") from error
        except Exception as error:
            if type(error).__name__ != "ZstdError":  # zstandard is imported only when a .zst file is read
                raise
            advice = "; unpack it first" if "too much memory" in str(error) else ""  # zstd --long
            raise DataError(f"{self._path} cannot be read: {error}{advice}") from error
        return part


class _ZstdFile:
    """Reads a zstandard file. Raises EOFError if the file is truncated, which the zstandard library does not
    detect."""

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._file, self._decompressor = file, zstandard.ZstdDecompressor()
        self._frame: Any = None  # a zstandard.ZstdDecompressionObj inside a frame
        self._packed, self._text = b"", memoryview(b"")

    def read(self, num_bytes: int) -> bytes:
        while not self._text:
            packed = self._packed or self._file.read(_PACKED_BYTES)
            if not packed:
                if self._frame is not None:
                    raise EOFError("it is cut off within a zstandard frame")
                return b""
            frame = self._frame or self._decompressor.decompressobj()
            self._text = memoryview(frame.decompress(packed))
            self._frame, self._packed = (None, frame.unused_data) if frame.eof else (frame, b"")
        part, self._text = self._text[:num_bytes], self._text[num_bytes:]
        return bytes(part)


def read_lines(path: Path, see: Callable[[bytes], object] = len) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, compressed or not, as pairs (line number from 1, line without its line
    feed). A carriage return before the line feed is kept; a byte order mark at the start is removed.
    ``see(block)`` is called with each block of bytes that is read, for example to hash the file. Raises
    DataError if the file cannot be read, is damaged or is truncated."""
    number, pending = 0, []
    with TextFile(path) as file:
        while block := file.read(_BLOCK_BYTES):
            see(block)
            if not number and not pending:
                block = block.removeprefix(BOM)
            first, *lines = block.split(b"\n")
            pending.append(first)
            if lines:
                *whole, rest = [b"".join(pending), *lines]
                for line in whole:
                    number += 1
                    yield number, line
                pending = [rest]
    if last := b"".join(pending):
        yield number + 1, last


_SPACE = re.compile(r"[ \t\r\n]*")


def read_records(path: Path, see: Callable[[bytes], object] = len) -> Iterator[tuple[int, bytes]]:
    """Yield the JSON records of a file, unparsed, as pairs (number of the record's first line, bytes). A
    record is a nonblank line or, in a ``.json`` file that begins with ``[``, an item of this array.
    ``see(block)`` is called with each block of bytes that is read, for example to hash the file."""
    lines = read_lines(path, see)
    first = next(((number, line) for number, line in lines if line.strip()), None)
    if first is None:
        return
    if path.suffix == ".json" and first[1].lstrip().startswith(b"["):
        yield from _items(path, first, lines)
        return
    yield first
    yield from ((number, line) for number, line in lines if line.strip())


def _items(
    path: Path, first: tuple[int, bytes], lines: Iterator[tuple[int, bytes]]
) -> Iterator[tuple[int, bytes]]:
    content = b"\n".join([first[1], *(line for _, line in lines)])
    try:
        text = content.decode("utf-8")
        count = len(json.loads(text))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{first[0] + error.lineno - 1}: this is not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: this is not JSON: {error}") from error
    number, decoder, end = first[0], json.JSONDecoder(), text.index("[")
    for _ in range(count):
        start = _SPACE.match(text, end + 1).end()
        number += text.count("\n", end, start)
        yield number, text[start : (stop := decoder.raw_decode(text, start)[1])].encode()
        end = text.find(",", stop)
        number += text.count("\n", start, end)


def load_line(line: bytes) -> Any:
    """Parse a line of JSON in UTF-8. Raises ValueError if the line is not JSON, and its subclass
    UnicodeDecodeError if it is not UTF-8."""
    try:
        return json.loads(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("too deeply nested") from None


def load_object(line: bytes, place: str, wanted: str) -> dict[str, Any]:
    """Parse one line of a JSON Lines file, which must contain a JSON object. Raises DataError if it does not.
    ``place`` (file and line) and ``wanted`` (a description of the expected fields) appear in the message."""
    try:
        record = load_line(line)
    except ValueError as error:
        raise DataError(f"{place}: this is not a line of JSON: {error}") from error
    if not isinstance(record, dict):
        is_array = isinstance(record, list) and any(isinstance(item, dict) for item in record)
        advice = "; a file that holds one array of objects must have a name in .json" if is_array else ""
        raise DataError(f"{place}: must be an object with {wanted}{advice}")
    return record


def text_of(record: dict[str, Any], field: str, place: str, hint: str = "") -> str:
    """Return the string in the field ``field`` of ``record``. Raises DataError if the field is missing, is
    not a string, or has a lone surrogate. ``place`` is the record's file and line, and ``hint`` is added to
    the message."""
    text = record.get(field)
    if text is not None and not isinstance(text, str):
        raise DataError(f"{place}: field {field!r} must be a text, not {shown(text)}")
    if text is None:
        names = ", ".join(map(shown, islice(record, _FIELDS_NAMED))) or "none"
        more = ", ..." if len(record) > _FIELDS_NAMED else ""
        raise DataError(f"{place}: field {field!r} must be a text; the record's fields: {names}{more}{hint}")
    refuse_surrogates(text, f"{place}: field {field!r}")
    return text


def refuse_surrogates(text: str, what: str) -> None:
    """Raise DataError if ``text`` has a lone surrogate, which JSON can contain but UTF-8 cannot. ``what``
    describes ``text`` in the message."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} holds a lone surrogate, which is not text") from error
