"""Find, open, convert and merge token corpora of both supported formats: ``.bin``/``.idx`` pairs as in
Megatron-LM, and the NumPy files of PaddleFleetX, called FleetX here.

FleetX's files are ``_ids.npy`` with ``_idx.npz``, or a single legacy file ``_ids.npz``. Their arrays are
``ids``, the tokens of all documents; ``lens`` (int32), the length of each sequence; and ``docs`` (int64, not
in the legacy file), the document boundaries, counted in sequences.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ppfleetx.config.errors import DataError, MissingDataError
from ppfleetx.config.message_text import counted
from ppfleetx.data.checksums import BLOCK_BYTES, read_checksums
from ppfleetx.data.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetWriter,
    TokenStore,
    bin_path,
    idx_path,
    refuse_to_replace,
    runs_from_zero,
)
from ppfleetx.utils.input_files import file_status, opened, os_errors
from ppfleetx.utils.progress_bar import ProgressBar

FLEETX_SUFFIXES = ("_ids.npy", "_idx.npz", "_ids.npz")
_BATCH = 1 << 16  # documents converted at a time


class FleetXDataset(TokenStore):
    """A token corpus in FleetX's NumPy files. ``prefix`` is their common path, with or without suffix.
    ``_ids.npy`` is memory-mapped, and the other files are read into memory. Raises DataError if a file is
    missing or damaged."""

    @os_errors(DataError)
    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        text = _without_suffix(os.fspath(prefix))
        if Path(f"{text}_ids.npy").exists():
            path = Path(f"{text}_ids.npy")
            with _numpy_errors_as_data_error(path):
                tokens = _integers(np.load(path, mmap_mode="r", allow_pickle=False), str(path))
            path = Path(f"{text}_idx.npz")
            index = _read_npz(path, ("lens",))
        else:
            path = Path(f"{text}_ids.npz")
            if not path.exists():
                raise DataError(f"no corpus at {text}: neither {text}_ids.npy nor {path} exists")
            index = _read_npz(path, ("ids", "lens"))
            tokens = index["ids"]
        lengths = index["lens"]
        boundaries = index.get("docs", np.arange(lengths.shape[0] + 1, dtype=np.int64))
        _check(path, tokens, lengths, boundaries)
        lengths = lengths.astype(np.int32, copy=False)
        byte_offsets = np.zeros(lengths.shape[0], np.int64)
        np.cumsum(lengths[:-1], out=byte_offsets[1:])
        byte_offsets *= tokens.dtype.itemsize
        super().__init__(text, tokens, lengths, byte_offsets, boundaries.astype(np.int64, copy=False))


def _read_npz(path: Path, required: tuple[str, ...]) -> dict[str, np.ndarray]:
    if not path.exists():
        raise DataError(f"{path} does not exist, and the corpus beside it needs it")
    with _numpy_errors_as_data_error(path), np.load(path, allow_pickle=False) as archive:
        for name in required:
            if name not in archive:
                raise DataError(f"{path} has no array {name!r}")
        return {
            name: _integers(archive[name], f"{path}, array {name!r},")
            for name in ("ids", "lens", "docs")
            if name in archive
        }


def _integers(array: np.ndarray, place: str) -> np.ndarray:
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"{place} must be a flat array of integers, not one of shape {array.shape} of {array.dtype}"
        )
    return array


@contextmanager
def _numpy_errors_as_data_error(path: Path) -> Iterator[None]:
    file_status(path, DataError)
    try:
        yield
    except (ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged, or not a NumPy file: {error}") from error


def _check(path: Path, tokens: np.ndarray, lengths: np.ndarray, boundaries: np.ndarray) -> None:
    total = int(lengths.sum(dtype=np.int64))
    if total != tokens.shape[0]:
        raise DataError(f"{path}: lens add up to {total:,}, ids has {counted(tokens.shape[0], 'token', ',')}")
    if not runs_from_zero(boundaries, lengths.shape[0]):
        sequences = counted(lengths.shape[0], "sequence", ",")
        raise DataError(f"{path} is damaged: docs must run from 0 to {sequences} and never decrease")


def convert(prefix: str | os.PathLike[str], out: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Convert a FleetX corpus to a ``.bin`` / ``.idx`` pair. Raises DataError if the corpus is missing or
    damaged, or if the pair exists and ``overwrite`` is False."""
    source = FleetXDataset(prefix)
    refuse_to_replace(out, overwrite)
    boundaries = source.document_indices
    starts = np.append(source.byte_offsets // source.dtype.itemsize, source.num_tokens)
    with IndexedDatasetWriter(out, source.dtype) as writer:
        for first in range(0, boundaries.shape[0] - 1, _BATCH):
            batch = boundaries[first : first + _BATCH + 1]
            flat = source.flat(int(starts[batch[0]]), int(starts[batch[-1]]))
            writer.add_sequences(flat, source.sizes[batch[0] : batch[-1]], batch[1:] - batch[0])


def merge(
    prefixes: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str], *, overwrite: bool = False
) -> None:
    """Concatenate the ``.bin`` / ``.idx`` pairs ``prefixes`` into a new pair ``out``. Raises DataError if an
    input is missing or damaged, if dtypes differ, if ``out`` is one of the inputs, or if ``out`` exists and
    ``overwrite`` is False."""
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
                raise DataError(
                    f"{prefix} stores {other.dtype}, {prefixes[0]} stores {writer.dtype}. A run can read "
                    "both: name them in a list in Data.Train.dataset.input_dir"
                )
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


_SUFFIXES = (".bin", ".idx", *FLEETX_SUFFIXES)


@os_errors(DataError)
def open_tokens(prefix: str | os.PathLike[str]) -> TokenStore:
    """Open the token corpus at the path ``prefix``, with or without suffix. A ``.bin``/``.idx`` pair takes
    precedence over FleetX's files. Raises DataError if the corpus is missing or damaged, or if its tokens are
    not integers."""
    text = _without_suffix(os.fspath(prefix))
    has_pair = bin_path(text).exists() or idx_path(text).exists()
    if not has_pair and any(Path(f"{text}{suffix}").exists() for suffix in FLEETX_SUFFIXES):
        return FleetXDataset(text)
    corpus = IndexedDataset(text)
    if corpus.dtype.kind == "f":
        raise DataError(f"{idx_path(text)} says that tokens are stored as {corpus.dtype}: they are not ids")
    return corpus


@os_errors(DataError)
def find_prefixes(entry: str | os.PathLike[str]) -> list[str]:
    """Return the paths, without suffix, of the corpora that ``entry`` names. If ``entry`` is a directory,
    these are all corpora in the directory, sorted by name. Otherwise, ``entry`` is the path of one corpus,
    which need not exist. Raises MissingDataError for a directory without corpora."""
    text = os.fspath(entry)
    if not Path(text).is_dir():
        return [_without_suffix(text)]
    names = (str(path) for path in Path(text).iterdir() if path.is_file())
    found = sorted({_without_suffix(name) for name in names if name.endswith(_SUFFIXES)})
    if not found:
        raise MissingDataError(
            f"no corpus in {text}: it holds no {', '.join(f'*{suffix}' for suffix in _SUFFIXES)}"
        )
    return found


def _without_suffix(path: str) -> str:
    for suffix in _SUFFIXES:
        path = path.removesuffix(suffix)
    return path
