"""Corpora preprocessed by FleetX: ``_ids.npy`` with ``_idx.npz``, or one legacy ``_ids.npz``.

``_ids`` holds the tokens of all documents one after the other. ``lens`` (int32) is the length of each
sequence, ``docs`` (int64, absent in the legacy file) the document boundaries counted in sequences, from 0.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np

from ppfleetx.config.errors import DataError
from ppfleetx.data.indexed import IndexedDatasetWriter
from ppfleetx.data.token_store import TokenStore

SUFFIXES = ("_ids.npy", "_idx.npz", "_ids.npz")
_BATCH = 1 << 16  # documents converted at a time


class FleetXDataset(TokenStore):
    """Reader with the interface of `ppfleetx.data.indexed.IndexedDataset`.

    The tokens of ``_ids.npy`` are memory-mapped; the legacy archive has to be read whole.

    Args:
        prefix: path without ``_ids.npy``; any of the suffixes is accepted and taken off.

    Raises:
        DataError: a file is missing, damaged, or its lengths do not add up to its tokens.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        text = os.fspath(prefix)
        for suffix in SUFFIXES:
            text = text.removesuffix(suffix)
        if Path(f"{text}_ids.npy").is_file():
            tokens = _load(Path(f"{text}_ids.npy"))
            index = _load_archive(Path(f"{text}_idx.npz"), ("lens",))
        else:
            index = _load_archive(Path(f"{text}_ids.npz"), ("ids", "lens"))
            tokens = index["ids"]
        lengths = index["lens"]
        boundaries = index.get("docs", np.arange(lengths.shape[0] + 1, dtype=np.int64))
        _check(text, tokens, lengths, boundaries)
        byte_offsets = np.zeros(lengths.shape[0], np.int64)
        np.cumsum(lengths[:-1], out=byte_offsets[1:])
        byte_offsets *= tokens.dtype.itemsize
        super().__init__(text, tokens, lengths.astype(np.int32, copy=False), byte_offsets, boundaries)


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _load_archive(path: Path, required: tuple[str, ...]) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise DataError(f"{path} does not exist, and the corpus beside it needs it")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if name in ("ids", "lens", "docs")}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    for name in required:
        if name not in arrays:
            raise DataError(f"{path} has no array {name!r}")
    return arrays


def _check(prefix: str, tokens: np.ndarray, lengths: np.ndarray, boundaries: np.ndarray) -> None:
    for name, array in (("ids", tokens), ("lens", lengths), ("docs", boundaries)):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                f"{prefix}: {name} must be a flat array of integers, not {array.dtype}{array.shape}"
            )
    if lengths.size and lengths.min() < 0:
        raise DataError(f"{prefix}: sequence {int(lengths.argmin())} has a negative length")
    if int(lengths.sum(dtype=np.int64)) != tokens.shape[0]:
        raise DataError(f"{prefix}: lens add up to {lengths.sum(dtype=np.int64)}, ids has {tokens.shape[0]}")
    if boundaries.size == 0 or boundaries[0] != 0 or boundaries[-1] != lengths.shape[0]:
        raise DataError(f"{prefix}: docs does not run from 0 to the {lengths.shape[0]} sequences")


def convert(prefix: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Write a FleetX corpus as a ``.bin`` / ``.idx`` pair with the same tokens, sequences and documents."""
    source = FleetXDataset(prefix)
    boundaries = source.document_indices
    starts = np.append(source.byte_offsets // source.dtype.itemsize, source.num_tokens)
    with IndexedDatasetWriter(out, source.dtype) as writer:
        for first in range(0, boundaries.shape[0] - 1, _BATCH):
            batch = boundaries[first : first + _BATCH + 1]
            flat = source.flat(int(starts[batch[0]]), int(starts[batch[-1]]))
            writer.add_sequences(flat, source.sizes[batch[0] : batch[-1]], batch[1:] - batch[0])
