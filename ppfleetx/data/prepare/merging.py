"""Several pairs to one, each compared with its checksums on the way."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from ppfleetx.config.errors import DataError
from ppfleetx.data.checksums import BLOCK_BYTES, read_checksums
from ppfleetx.data.indexed import IndexedDataset, IndexedDatasetWriter, bin_path, refuse_to_replace
from ppfleetx.utils.foreign_files import opened
from ppfleetx.utils.progress import ProgressBar


def merge(
    prefixes: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str], *, overwrite: bool = False
) -> None:
    """Write one pair holding the given pairs one after the other, in the order given.

    Raises:
        DataError: no input, a damaged input, different dtypes, the output is one of the inputs, or it is
            there already and not to be replaced.
    """
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
            writer.add_index(other, _counted(_sound_blocks(other.prefix), bar))


def _counted(blocks: Iterable[bytes], bar: ProgressBar) -> Iterator[bytes]:
    for block in blocks:
        yield block
        bar.advance(len(block) / 1e6)


def _sound_blocks(prefix: str) -> Iterator[bytes]:
    """The bytes of ``.bin``; they, and all of ``.idx`` before, are compared with the checksums there are."""
    checksums = read_checksums(prefix)
    if checksums is None:
        yield from _plain_blocks(prefix)
        return
    checksums.check_sizes()
    for damage in checksums.damage((".idx",)):
        raise DataError(str(damage))
    for data, damage in checksums.blocks(".bin"):
        if damage is not None:
            raise DataError(f"{damage}; ppfleetx inspect-data {prefix} --verify names the documents")
        yield data


def _plain_blocks(prefix: str) -> Iterator[bytes]:
    with opened(bin_path(prefix), DataError) as file:
        while data := file.read(BLOCK_BYTES):
            yield data
