"""Tokenized corpora on disk, in Megatron-LM's format, a ``.bin`` / ``.idx`` pair.

``PREFIX.bin`` holds the token ids of all sequences, concatenated. ``PREFIX.idx`` is little-endian, with N
sequences and D = documents + 1::

    offset     bytes  content
    0          9      magic  b"MMIDIDX\\0\\0"
    9          8      version = 1 (uint64)
    17         1      dtype code (uint8)
    18         8      N (uint64)
    26         8      D (uint64)
    34         4N     length of each sequence in tokens (int32)
    34 + 4N    8N     byte offset of each sequence in .bin (int64)
    34 + 12N   8D     document boundaries counted in sequences, first 0, last N (int64)

A document can have any number of sequences (sentences). Sequences are the units of shuffling and splitting.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import mmap
import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from ppfleetx.config.errors import DataError, MissingDataError
from ppfleetx.data.checksums import CorpusChecksums, FileChecksums, checksums_path
from ppfleetx.utils.input_files import file_status, opened, os_errors
from ppfleetx.utils.output_files import atomic_write

_CHUNK = 1 << 22  # index entries handled at a time, to avoid a second copy of the index in memory
_SAMPLED_BLOCKS, _BLOCK_BYTES = 16, 4096


def runs_from_zero(boundaries: np.ndarray, last: int) -> bool:
    """Whether ``boundaries`` start with 0, end with ``last`` and never decrease."""
    if not boundaries.shape[0] or boundaries[0] != 0 or boundaries[-1] != last:
        return False
    parts = (boundaries[first : first + _CHUNK + 1] for first in range(0, boundaries.shape[0], _CHUNK))
    return all((part[1:] >= part[:-1]).all() for part in parts)


class TokenStore:
    """Base class for tokenized corpora: sequences of token ids, concatenated in one flat array.

    Attributes:
        prefix: the corpus's path without suffix, for messages.
        sizes: number of tokens of each sequence, int32 [sequences].
        byte_offsets: start of each sequence in the flat array, in bytes, int64 [sequences].
        document_indices: document boundaries counted in sequences, int64 [documents + 1].
    """

    def __init__(
        self,
        prefix: str,
        tokens: np.ndarray,
        sizes: np.ndarray,
        byte_offsets: np.ndarray,
        document_indices: np.ndarray,
    ) -> None:
        self.prefix = prefix
        self.sizes = sizes
        self.byte_offsets = byte_offsets
        self.document_indices = document_indices
        self.dtype = tokens.dtype
        self._tokens = tokens

    def __len__(self) -> int:
        return self.sizes.shape[0]

    @property
    def num_tokens(self) -> int:
        return self._tokens.shape[0]

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return tokens ``[offset, offset + length)`` of sequence ``index``, as a view, which must not be
        modified. If ``length`` is None, the range extends to the end of the sequence. The range is not
        checked."""
        length = int(self.sizes[index]) - offset if length is None else length
        start = int(self.byte_offsets[index]) // self.dtype.itemsize + offset
        return self._tokens[start : start + length]

    def flat(self, first: int, last: int) -> np.ndarray:
        """Return tokens ``[first, last)`` of the whole corpus, counted over all sequences, as a view."""
        return self._tokens[first:last]

    @cached_property
    def fingerprint(self) -> str:
        """A hash that identifies the corpus, computed without reading all of it. It covers sequence lengths,
        document boundaries, total size and a few blocks of tokens."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{self.dtype.str} {len(self)} {self.num_tokens}".encode())
        for values in (self.sizes, self.document_indices):
            for first in range(0, values.shape[0], _CHUNK):
                digest.update(np.ascontiguousarray(values[first : first + _CHUNK]))
        block = _BLOCK_BYTES // self.dtype.itemsize
        last = max(0, self.num_tokens - block)
        for first in sorted({last * i // (_SAMPLED_BLOCKS - 1) for i in range(_SAMPLED_BLOCKS)}):
            digest.update(np.ascontiguousarray(self._tokens[first : first + block]))
        return digest.hexdigest()


MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def optimal_dtype(vocab_size: int | None) -> np.dtype:
    """Return the dtype in which Megatron-LM stores token ids: uint16 for a vocabulary of fewer than 65,500
    tokens (without padding), else int32."""
    small = vocab_size is not None and vocab_size < 65500
    return np.dtype("<u2") if small else np.dtype("<i4")


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.idx")


def refuse_to_replace(prefix: str | os.PathLike[str], overwrite: bool) -> None:
    """Raise DataError if the corpus ``prefix`` exists and ``overwrite`` is False. A corpus counts as existing
    if it has its ``.idx`` file, which is written last."""
    if idx_path(prefix).exists() and not overwrite:
        raise DataError(f"{idx_path(prefix)} exists already; --overwrite replaces it")


def no_corpus(prefix: str) -> MissingDataError:
    """Return the error that there are no files with ``prefix``. It names a corpus whose name begins so:
    ``preprocess`` appends the JSON key and ``_document`` to its ``--output-prefix``."""
    longer = sorted(Path(prefix).parent.glob(f"{glob.escape(Path(prefix).name)}*.idx"))
    meant = f" (there is {longer[0].with_suffix('')})" if longer else ""
    return MissingDataError(
        f"no corpus at {prefix}: neither {bin_path(prefix)} nor {idx_path(prefix)} exists{meant}"
    )


class IndexedDataset(TokenStore):
    """A corpus in Megatron-LM's format, a memory-mapped ``.bin`` / ``.idx`` pair. ``prefix`` is the common
    path of both files, with or without suffix. Raises DataError if a file is missing, damaged or not
    supported."""

    @os_errors(DataError)
    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        text = os.fspath(prefix)
        text = text[:-4] if text.endswith((".bin", ".idx")) else text
        if bin_path(text).is_file() != idx_path(text).is_file():
            there, missing = (bin_path, idx_path) if bin_path(text).is_file() else (idx_path, bin_path)
            raise DataError(f"{there(text)} exists but its partner {missing(text)} does not")
        if not idx_path(text).is_file():
            raise no_corpus(text)
        dtype, sizes, byte_offsets, document_indices = _read_index(idx_path(text))
        _check_index(text, dtype, sizes, byte_offsets, document_indices)
        super().__init__(
            text, _map_file(bin_path(text), dtype, read_ahead=False), sizes, byte_offsets, document_indices
        )


def _map_file(path: Path, dtype: np.dtype, *, read_ahead: bool = True) -> np.ndarray:
    size = file_status(path, DataError).st_size
    if size % dtype.itemsize or size == 0:
        return np.empty(0, dtype)  # mmap rejects an empty file; `_check_index` decides whether it is an error
    with opened(path, DataError) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if not read_ahead and hasattr(mmap, "MADV_RANDOM"):
        # Samples are read at random positions. Read-ahead costs milliseconds per sample until the corpus is
        # cached.
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, dtype)


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    raw = _map_file(path, np.dtype("u1"))
    if raw.shape[0] < HEADER.size:
        raise DataError(f"{path} is truncated: {raw.shape[0]} bytes, the header alone has {HEADER.size}")
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise DataError(f"{path} is not an index file: it starts with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise DataError(f"{path} has format version {version}; only version {VERSION} is known")
    if code not in DTYPES:
        raise DataError(f"{path} has token dtype code {code}; known codes are {sorted(DTYPES)}")
    lengths_end = HEADER.size + 4 * num_sequences
    offsets_end = lengths_end + 8 * num_sequences
    expected = offsets_end + 8 * num_boundaries
    if num_sequences and raw.shape[0] == expected + num_sequences:
        raise DataError(
            f"{path} belongs to a multimodal corpus (it has sequence modes), which is not supported"
        )
    if raw.shape[0] != expected:
        kind = "truncated" if raw.shape[0] < expected else "damaged"
        raise DataError(
            f"{path} is {kind}: {raw.shape[0]} bytes, but {num_sequences} sequences and {num_boundaries} "
            f"document boundaries need {expected}"
        )
    sizes = raw[HEADER.size : lengths_end].view("<i4")
    return DTYPES[code], sizes, raw[lengths_end:offsets_end].view("<i8"), raw[offsets_end:].view("<i8")


def _check_index(
    prefix: str, dtype: np.dtype, sizes: np.ndarray, byte_offsets: np.ndarray, document_indices: np.ndarray
) -> None:
    path, total = idx_path(prefix), 0
    for first in range(0, sizes.shape[0], _CHUNK):
        lengths = sizes[first : first + _CHUNK].astype(np.int64)
        if lengths.min() < 0:
            raise DataError(
                f"{path} is damaged: sequence {first + int(lengths.argmin())} has a negative length"
            )
        ends = total * dtype.itemsize + np.cumsum(lengths) * dtype.itemsize
        wrong = np.flatnonzero(byte_offsets[first : first + _CHUNK] != ends - lengths * dtype.itemsize)
        if wrong.size:
            raise DataError(
                f"{path} is damaged: sequence {first + int(wrong[0])} does not follow the one before"
            )
        total += int(lengths.sum())
    if not runs_from_zero(document_indices, sizes.shape[0]):
        raise DataError(f"{path} is damaged: document boundaries do not run from 0 to {sizes.shape[0]}")
    actual = bin_path(prefix).stat().st_size
    if actual != total * dtype.itemsize:
        kind = "truncated" if actual < total * dtype.itemsize else "too long"
        raise DataError(
            f"{bin_path(prefix)} is {kind}: {actual} bytes, but its index counts {total} tokens of "
            f"{dtype.itemsize} bytes = {total * dtype.itemsize}"
        )


class IndexedDatasetWriter:
    """Writes a ``.bin`` / ``.idx`` pair, document by document, and the checksums of both files. As a context
    manager, calls `finalize` on success and `abort` after an exception. Raises DataError if the dtype is not
    supported, if token ids do not fit into it, or if a file cannot be written."""

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.dtype | type | str) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in _CODES:
            raise DataError(f"tokens cannot be stored as {self.dtype}; known: {', '.join(map(str, _CODES))}")
        self._lengths = array("i")
        self._boundaries = array("q", [0])
        self.num_tokens = 0
        self._checksums = FileChecksums()
        self._temporary = Path(f"{bin_path(prefix)}.{os.getpid()}.tmp")
        with self._writing():
            bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("wb")

    @property
    def num_documents(self) -> int:
        return len(self._boundaries) - 1

    def add_document(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int]) -> None:
        """Append one document. Its ``tokens`` are divided into sequences of the given ``lengths``."""
        self.add_sequences(np.asarray(tokens), np.asarray(lengths, np.int64), np.array([len(lengths)]))

    def add_documents(self, flat_tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents, each as one sequence. An empty document gets no sequence. ``flat_tokens`` are the
        tokens of all documents, and ``lengths`` the number of tokens of each."""
        # A document of length 0 has no sequence, as with add_document([], []).
        lengths = np.asarray(lengths)
        filled = lengths != 0
        self.add_sequences(flat_tokens, lengths[filled], np.cumsum(filled, dtype=np.int64))

    def add_sequences(self, flat_tokens: np.ndarray, lengths: np.ndarray, boundaries: np.ndarray) -> None:
        """Append documents of any number of sequences. ``flat_tokens`` are the tokens of all sequences,
        concatenated, and ``lengths`` the number of tokens of each. ``boundaries[i]`` is the number of
        sequences in the first i + 1 documents of this call. Raises ValueError if a length is negative, or if
        the lengths do not sum to the number of tokens."""
        if np.sum(lengths) != len(flat_tokens) or (len(lengths) and np.min(lengths) < 0):
            raise ValueError(f"lengths sum to {np.sum(lengths)}, but there are {len(flat_tokens)} tokens")
        boundaries = np.asarray(boundaries, np.int64) + len(self._lengths)
        self._write(flat_tokens)
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self._boundaries.frombytes(boundaries.tobytes())

    def add_index(self, other: IndexedDataset, blocks: Iterable[bytes]) -> None:
        """Append all documents of the corpus ``other``, which must have the same dtype. ``blocks`` is the
        content of its ``.bin`` file, in blocks of any size."""
        assert other.dtype == self.dtype
        first_sequence = len(self._lengths)
        for first in range(0, len(other), _CHUNK):
            self._lengths.frombytes(other.sizes[first : first + _CHUNK].tobytes())
        for first in range(1, other.document_indices.shape[0], _CHUNK):
            self._boundaries.frombytes(
                (first_sequence + other.document_indices[first : first + _CHUNK]).tobytes()
            )
        for block in blocks:
            self._write_bytes(block)
        self.num_tokens += other.num_tokens

    def finalize(self) -> None:
        """Complete the corpus: write the index and the checksums, and give both files their final names."""
        with self._writing():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            # An old index must never exist beside new tokens. So the old index is removed first, and the new
            # index is written last, after the checksums.
            idx_path(self.prefix).unlink(missing_ok=True)
            checksums_path(self.prefix).unlink(missing_ok=True)
            self._temporary.replace(bin_path(self.prefix))
            with atomic_write(idx_path(self.prefix)) as file:
                files = {".bin": self._checksums, ".idx": self._write_index(file)}
                CorpusChecksums(self.prefix, files).write()

    def abort(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finalize()
        else:
            self.abort()

    def _write(self, values: np.ndarray) -> None:
        if values.dtype != self.dtype:
            _check_fits(values, self.dtype, self.prefix)
            values = values.astype(self.dtype)
        if values.size:
            self._write_bytes(np.ascontiguousarray(values).data.cast("B"))
        self.num_tokens += values.shape[0]

    def _write_bytes(self, data: bytes | memoryview) -> None:
        with self._writing():
            self._file.write(data)
        self._checksums.update(data)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(f"cannot write {self.prefix}: {error.strerror or error}") from error

    def _write_index(self, file: BinaryIO) -> FileChecksums:
        checksums = FileChecksums()

        def write(values: np.ndarray) -> None:
            if values.size:
                file.write(values.data)
                checksums.update(values.data.cast("B"))

        lengths = np.frombuffer(self._lengths, np.int32)
        header = (MAGIC, VERSION, _CODES[self.dtype], lengths.shape[0], len(self._boundaries))
        write(np.frombuffer(HEADER.pack(*header), np.uint8))
        write(lengths.astype("<i4", copy=False))
        offset = 0
        for first in range(0, lengths.shape[0], _CHUNK):
            widths = lengths[first : first + _CHUNK].astype("<i8") * self.dtype.itemsize
            ends = offset + np.cumsum(widths)
            write(ends - widths)
            offset = int(ends[-1])
        write(np.frombuffer(self._boundaries, np.int64).astype("<i8", copy=False))
        return checksums


def _check_fits(values: np.ndarray, dtype: np.dtype, prefix: str) -> None:
    if values.size == 0 or dtype.kind == "f":
        return
    if values.dtype.kind not in "iu":
        raise DataError(f"{prefix}: token ids must be integers, got {values.dtype}")
    limits = np.iinfo(dtype)
    low, high = int(values.min()), int(values.max())
    if low < limits.min or high > limits.max:
        raise DataError(f"{prefix}: token ids {low} to {high} do not fit the stored dtype {dtype}")
