"""Checksums of a tokenized corpus, in the file ``PREFIX.checksums.json`` beside it: a CRC-32 of each 1 MiB
block of ``PREFIX.bin`` and ``PREFIX.idx``, and a CRC-32 of the checksum file's own content."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ppfleetx.config.errors import DataError
from ppfleetx.config.message_text import counted
from ppfleetx.utils.input_files import file_status, opened
from ppfleetx.utils.output_files import atomic_write

BLOCK_BYTES = 1 << 20
SUFFIXES = (".bin", ".idx")
_FORMAT, _VERSION = "ppfleetx corpus checksums", 1
_HEX_DIGITS = 8  # hexadecimal digits of one CRC-32


def checksums_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.checksums.json")


@dataclass
class FileChecksums:
    """The length of a file, and the CRC-32 of each of its blocks of 1 MiB (the last may be shorter)."""

    num_bytes: int = 0
    crcs: list[int] = field(default_factory=list)

    def update(self, data: bytes | memoryview) -> None:
        """Add ``data``, the next bytes of the file, to the length and the checksums."""
        view = memoryview(data)
        position = 0
        while position < len(view):
            filled = self.num_bytes % BLOCK_BYTES
            if not filled:
                self.crcs.append(0)
            piece = view[position : position + BLOCK_BYTES - filled]
            self.crcs[-1] = zlib.crc32(piece, self.crcs[-1])
            self.num_bytes += len(piece)
            position += len(piece)


@dataclass(frozen=True)
class Block:
    """A damaged block of a corpus file: bytes ``[first, end)`` of the file ``path`` do not match their
    checksum."""

    path: Path
    number: int
    first: int
    end: int

    def __str__(self) -> str:
        span = f"bytes [{self.first:,}, {self.end:,})"
        return f"{self.path}: block {self.number:,}, {span}, is not as it was written"


@dataclass(frozen=True)
class CorpusChecksums:
    """The contents of ``PREFIX.checksums.json``. ``files`` has the checksums of the corpus files by suffix,
    ``.bin`` and ``.idx``."""

    prefix: str
    files: dict[str, FileChecksums]

    def write(self) -> None:
        """Write ``PREFIX.checksums.json`` atomically. Raises DataError if that fails."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "algorithm": "crc32",
            "block_bytes": BLOCK_BYTES,
            "files": {
                suffix: {"bytes": sums.num_bytes, "crc32": "".join(f"{crc:08x}" for crc in sums.crcs)}
                for suffix, sums in self.files.items()
            },
        }
        path = checksums_path(self.prefix)
        try:
            with atomic_write(path, "w") as file:
                json.dump({**content, "own_crc32": _own_crc(content)}, file, indent=1)
                file.write("\n")
        except OSError as error:
            raise DataError(f"cannot write {path}: {error.strerror or error}") from error

    def check_sizes(self) -> None:
        """Raise DataError if a file of the corpus is missing or no longer has the length recorded with its
        checksums."""
        for suffix, sums in self.files.items():
            path = Path(f"{self.prefix}{suffix}")
            actual = file_status(path, DataError).st_size
            if actual != sums.num_bytes:
                raise DataError(
                    f"{path} has {counted(actual, 'byte', ',')}, but {checksums_path(self.prefix)} is for "
                    f"{sums.num_bytes:,}: the corpus is damaged, or a program that writes no checksums has "
                    "rewritten it. In that case remove the checksums"
                )

    def blocks(self, suffix: str) -> Iterator[tuple[bytes, Block | None]]:
        """Read the corpus file with the suffix ``suffix`` block by block. Yields (bytes of the block,
        damage), where damage is a `Block` if the bytes do not match their checksum, else None."""
        path, sums = Path(f"{self.prefix}{suffix}"), self.files[suffix]
        with opened(path, DataError) as file:
            for number, crc in enumerate(sums.crcs):
                data = file.read(BLOCK_BYTES)
                first = number * BLOCK_BYTES
                end = min(first + BLOCK_BYTES, sums.num_bytes)
                is_sound = len(data) == end - first and zlib.crc32(data) == crc
                yield data, None if is_sound else Block(path, number, first, end)

    def damage(self, suffixes: tuple[str, ...] = SUFFIXES) -> Iterator[Block]:
        for suffix in suffixes:
            yield from (block for _, block in self.blocks(suffix) if block is not None)


def compute_checksums(prefix: str | os.PathLike[str]) -> CorpusChecksums:
    files = {}
    for suffix in SUFFIXES:
        sums = FileChecksums()
        with opened(f"{os.fspath(prefix)}{suffix}", DataError) as file:
            while data := file.read(BLOCK_BYTES):
                sums.update(data)
        files[suffix] = sums
    return CorpusChecksums(os.fspath(prefix), files)


def read_checksums(prefix: str | os.PathLike[str]) -> CorpusChecksums | None:
    """Read the checksums of the corpus ``prefix``. Returns None if there are none. Raises DataError if the
    checksum file itself is damaged.
    """
    path = checksums_path(prefix)
    if not path.exists():
        return None
    with opened(path, DataError) as file:
        content = file.read()
    try:
        files = _parse(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} itself is damaged ({error}); remove it to do without checksums") from error
    return CorpusChecksums(os.fspath(prefix), files)


def _parse(text: bytes) -> dict[str, FileChecksums]:
    content = json.loads(text)
    own = content.pop("own_crc32", None)
    expected = {"format": _FORMAT, "version": _VERSION, "algorithm": "crc32", "block_bytes": BLOCK_BYTES}
    for key, value in expected.items():
        if content[key] != value:
            raise ValueError(f"{key} is not {value!r}")
    if own != _own_crc(content):
        raise ValueError("its own checksum is wrong")
    files = {}
    for suffix in SUFFIXES:
        entry = content["files"][suffix]
        num_bytes, digits = int(entry["bytes"]), entry["crc32"]
        crcs = [int(digits[i : i + _HEX_DIGITS], 16) for i in range(0, len(digits), _HEX_DIGITS)]
        if num_bytes < 0 or len(crcs) != -(-num_bytes // BLOCK_BYTES):
            raise ValueError(f"{len(crcs)} checksums for {num_bytes} bytes")
        files[suffix] = FileChecksums(num_bytes, crcs)
    return files


def _own_crc(content: dict) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
