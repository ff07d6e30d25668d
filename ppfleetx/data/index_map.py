"""The order of training samples, stored in the same three arrays as in Megatron-LM's
``core/datasets/gpt_dataset.py``.

The sequences of a split, repeated for each epoch and shuffled (`document_index`), form one stream of tokens.
Sample k consists of L + 1 tokens of the stream, beginning with token k * L, where L is the sequence length.
`sample_index` holds the start of each sample, and `shuffle_index` the order in which samples are read.

The arrays are cached on disk. Several processes can build them at the same time.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ppfleetx.config.errors import DataError
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.machine import available_bytes
from ppfleetx.utils.output_files import atomic_write

ORDER_VERSION = 1
"""Version of the sample order, a part of cache names and fingerprints. Increase it when equal arguments give
a different order than before."""

_CHUNK = 1 << 22  # sequences handled at a time, to limit temporary memory to about 100 MB
_SEPARATE_BELOW = 0.80  # shuffle the last epoch separately if less than this share is needed


@dataclass(frozen=True)
class EpochPlan:
    """The number of epochs of a corpus that a run needs, and how the last one is shuffled.

    Attributes:
        sequence_length: number of tokens of a sample.
        num_epochs: the smallest number of epochs with enough tokens.
        separate_final_epoch: whether the last epoch is shuffled by itself and read last.
    """

    tokens_per_epoch: int
    sequence_length: int
    num_epochs: int
    separate_final_epoch: bool

    @property
    def num_samples(self) -> int:
        return (self.num_epochs * self.tokens_per_epoch - 1) // self.sequence_length

    @property
    def num_samples_before_final_epoch(self) -> int:
        return ((self.num_epochs - 1) * self.tokens_per_epoch - 1) // self.sequence_length


@dataclass(frozen=True)
class IndexMaps:
    """The three arrays that store the order of samples.

    Attributes:
        document_index: the sequences in the order of the token stream, int32 [epochs * sequences]. The
            name is Megatron-LM's.
        sample_index: where each sample starts, as (position in ``document_index``, token within that
            sequence), int32 or int64 [samples + 1, 2].
        shuffle_index: the samples in the order in which they are read, uint32 or int64 [samples].
    """

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


def plan_epochs(
    tokens_per_epoch: int, sequence_length: int, num_samples: int | None, at_least: int = 0
) -> EpochPlan:
    """Compute how many epochs are needed for ``num_samples`` samples (None: one epoch), and whether the last
    epoch is shuffled separately. If the epochs for ``num_samples`` have fewer than ``at_least`` samples, the
    plan is for ``at_least`` samples instead. ``at_least`` is ignored if ``num_samples`` is None."""
    assert tokens_per_epoch > 0
    assert sequence_length > 0
    if num_samples is None:
        return EpochPlan(tokens_per_epoch, sequence_length, 1, False)
    needed = num_samples * sequence_length + 1
    num_epochs = max(1, -(-needed // tokens_per_epoch))
    plan = EpochPlan(tokens_per_epoch, sequence_length, num_epochs, False)
    if plan.num_samples < at_least:
        return plan_epochs(tokens_per_epoch, sequence_length, at_least)
    if num_epochs == 1:
        return plan
    from_last_epoch = num_samples - plan.num_samples_before_final_epoch
    samples_per_epoch = (tokens_per_epoch - 1) // sequence_length
    separate = from_last_epoch < int(_SEPARATE_BELOW * samples_per_epoch)
    return EpochPlan(tokens_per_epoch, sequence_length, num_epochs, separate)


def maps_bytes(num_sequences: int, plan: EpochPlan) -> int:
    """Return the size in bytes of the three arrays that store the order of a split's samples. Building them
    takes roughly as much memory."""
    entries = num_sequences * plan.num_epochs
    position = 4 if entries <= np.iinfo(np.int32).max else 8
    sample = 4 if plan.num_samples < np.iinfo(np.uint32).max - 1 else 8
    return 4 * entries + 2 * position * (plan.num_samples + 1) + sample * plan.num_samples


def build_index_maps(sizes: np.ndarray, first: int, last: int, plan: EpochPlan, seed: int) -> IndexMaps:
    """Build the arrays that store the order of samples, for the sequences ``[first, last)`` of a corpus.
    ``sizes`` is the number of tokens of each sequence in the corpus, int32."""
    # Only NumPy's legacy generator gives Megatron-LM's permutations.
    random = np.random.RandomState(seed)
    # Sizes mapped from an .idx file start at byte 34; gathering from unaligned memory is slow.
    sizes = np.require(sizes, requirements="A")
    document_index = _document_index(first, last, plan, random)
    sample_index = _sample_index(sizes, document_index, plan)
    return IndexMaps(document_index, sample_index, _shuffle_index(plan, random))


def _document_index(first: int, last: int, plan: EpochPlan, random: np.random.RandomState) -> np.ndarray:
    sequences = np.arange(first, last, dtype=np.int32)
    blocks = [plan.num_epochs - 1, 1] if plan.separate_final_epoch else [plan.num_epochs]
    shuffled = []
    for repeats in blocks:
        block = np.tile(sequences, repeats)
        random.shuffle(block)
        shuffled.append(block)
    return shuffled[0] if len(shuffled) == 1 else np.concatenate(shuffled)


def _sample_index(sizes: np.ndarray, document_index: np.ndarray, plan: EpochPlan) -> np.ndarray:
    """Return where each sample starts in the token stream, as rows (position in ``document_index``, token
    within that sequence), [samples + 1, 2]. ``sizes`` is the number of tokens of each sequence in the corpus.
    """
    # Row k is for token k * L of the stream; the last row is for the last token of the last sample.
    length, num_rows = plan.sequence_length, plan.num_samples + 1
    dtype = np.int32 if document_index.shape[0] <= np.iinfo(np.int32).max else np.int64
    rows = np.empty((num_rows, 2), dtype)
    stream_position, row = 0, 0
    for begin in range(0, document_index.shape[0], _CHUNK):
        ends = np.cumsum(sizes[document_index[begin : begin + _CHUNK]], dtype=np.int64)
        ends += stream_position
        next_row = min(num_rows, -(-int(ends[-1]) // length))
        positions = np.arange(row, next_row, dtype=np.int64) * length
        # A token lies in the first sequence that ends after it, so empty sequences are skipped.
        index = np.searchsorted(ends, positions, side="right")
        starts = np.concatenate(([stream_position], ends[:-1]))
        rows[row:next_row, 0] = index + begin
        rows[row:next_row, 1] = positions - starts[index]
        stream_position, row = int(ends[-1]), next_row
    assert row == num_rows, (row, num_rows)
    rows[0] = 0  # even if the first sequence is empty
    return rows


def _shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> np.ndarray:
    total = plan.num_samples
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    border = plan.num_samples_before_final_epoch if plan.separate_final_epoch else total
    order = np.arange(total, dtype=dtype)
    random.shuffle(order[:border])
    if border < total:
        random.shuffle(order[border:])
    return order


def order_fingerprint(corpus: str, first: int, last: int, plan: EpochPlan, seed: int) -> str:
    """Return a hash of exactly the inputs that determine the order of samples."""
    # The number of samples is left out: a longer run that begins with the same samples has the same
    # fingerprint.
    decisive = {
        "version": ORDER_VERSION,
        "corpus": corpus,
        "sequences": [first, last],
        "sequence_length": plan.sequence_length,
        "num_epochs": plan.num_epochs,
        "separate_final_epoch": plan.separate_final_epoch,
        "seed": seed,
    }
    return hashlib.blake2b(json.dumps(decisive, sort_keys=True).encode(), digest_size=16).hexdigest()


Arrays = dict[str, np.ndarray]

_READ_BYTES = 16 << 20


def load_or_build(
    directory: Path,
    key: str,
    names: tuple[str, ...],
    build: Callable[[], Arrays],
    *,
    num_bytes: int,
) -> Arrays:
    """Return the arrays ``names`` from the cache in ``directory``, memory-mapped. If their files are missing
    or damaged, the arrays are first made by ``build`` and written to the cache. If the cache cannot be
    written, logs a warning and returns the arrays in memory.

    Args:
        key: the beginning of the names of the files.
        num_bytes: the memory that ``build`` takes. Raises DataError if less is free.
    """
    stored = _load(directory, key, names)
    if stored is not None:
        return stored
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise DataError(
            f"the order of the samples takes {num_bytes / 2**30:,.1f} GiB of memory to build, and "
            f"{available / 2**30:,.1f} GiB are free. It holds Engine.max_steps x Global.global_batch_size "
            "samples (Eval: eval_iters, Test: test_iters): make one of them smaller"
        )
    built = build()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _store(directory, key, built)
    except OSError as error:
        get_logger().warning(
            f"the index maps cannot be kept in {directory} ({error.strerror}), so every process builds them "
            "again; Data.<mode>.dataset.cache_dir may name a directory that can be written"
        )
        return built
    return _load(directory, key, names) or built


def _array_path(directory: Path, key: str, name: str) -> Path:
    return directory / f"{key}-{name}.npy"


def _store(directory: Path, key: str, arrays: Arrays) -> None:
    entries = {}
    for name, array in arrays.items():
        path = _array_path(directory, key, name)
        with atomic_write(path) as file:
            np.save(file, array, allow_pickle=False)
        entries[name] = {"bytes": path.stat().st_size, "crc32": _crc32(path)}
    with atomic_write(directory / f"{key}.json", "w") as file:
        json.dump({"arrays": entries}, file, indent=1)


def _load(directory: Path, key: str, names: tuple[str, ...]) -> Arrays | None:
    description = directory / f"{key}.json"
    if not description.is_file():
        return None
    try:
        entries = json.loads(description.read_text("utf-8"))["arrays"]
        paths = {name: _array_path(directory, key, name) for name in names}
        whole = all(_is_whole(path, entries[name]) for name, path in paths.items())
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        get_logger().warning(f"the index maps {directory / key}-*.npy are damaged and are built again")
        return None
    return {n: np.load(p, mmap_mode="r", allow_pickle=False).view(np.ndarray) for n, p in paths.items()}


def _is_whole(path: Path, entry: Mapping[str, int]) -> bool:
    return path.stat().st_size == entry["bytes"] and _crc32(path) == entry["crc32"]


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
