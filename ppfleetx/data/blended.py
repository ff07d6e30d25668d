"""Blend several corpora into one dataset, so that training draws samples from them in given proportions."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ppfleetx.config.message_text import counted
from ppfleetx.data.gpt_dataset import PADDING, GPTDataset, Sample
from ppfleetx.data.index_map import load_or_build

BLEND_VERSION = 1
"""Version of the blending order, a part of cache names and fingerprints. Increase it when equal weights give
a different order than before."""

SURPLUS = 0.005
"""Fraction of extra samples to prepare from each corpus, because the blend can take slightly more samples
than the corpus's weight says."""


_BYTES_PER_SAMPLE = 2 + 8 + 3 * 8  # two output arrays, and the intermediate arrays of the build
_BLOCK_STEPS, _NUM_BLOCKS = 2048, 1024  # steps per block, and blocks that are computed at the same time


def blending_indices(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose the corpus of each sample of a blend, in the same order as Megatron-LM's ``helpers.cpp``.
    ``weights`` are the shares of the corpora and sum to 1. Returns the corpus of each sample (int16 [size]),
    and the sample's number within that corpus (int64 [size])."""
    shares = np.array(weights, np.float64)
    return _indices(shares, np.full(len(shares), np.inf), size)


def exhaustive_indices(sizes: Sequence[int], size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Compute the order of a blend that takes every sample of every corpus exactly once, as in Megatron-LM's
    ``build_exhaustive_blending_indices``. Returns the corpus of each sample (int16 [size]), and the sample's
    number within that corpus (int64 [size]).

    Args:
        sizes: the number of samples of each corpus.
        size: the number of samples in the result, from the start of the order; None: all.
    """
    limits = np.array(sizes, np.float64)
    return _indices(limits / np.sum(limits), limits, sum(sizes) if size is None else size)


def _indices(shares: np.ndarray, limits: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    assert len(shares) <= np.iinfo(np.int16).max, "too many corpora for one blend"
    chosen = np.empty(size, np.int16)
    taken = np.zeros(len(shares))
    for first in range(0, size, _NUM_BLOCKS * _BLOCK_STEPS):
        part = chosen[first : first + _NUM_BLOCKS * _BLOCK_STEPS]
        num_blocks = -(-part.shape[0] // _BLOCK_STEPS)
        part[:] = _choose(shares, limits, first, num_blocks, taken)[: part.shape[0]]
        taken += np.bincount(part, minlength=len(shares))
    by_corpus = np.argsort(chosen, kind="stable")
    counts = np.bincount(chosen, minlength=len(shares))
    numbers = np.empty(size, np.int64)
    numbers[by_corpus] = np.arange(size) - np.repeat(np.cumsum(counts) - counts, counts)
    return chosen, numbers


def _choose(
    weights: np.ndarray, limits: np.ndarray, first: int, num_blocks: int, taken: np.ndarray
) -> np.ndarray:
    """Choose the corpus of each sample in ``num_blocks`` consecutive blocks of `_BLOCK_STEPS` samples. The
    first block begins with sample ``first`` of the blend. ``taken[c]`` is the number of earlier samples from
    corpus c, and ``limits[c]`` is the size of corpus c, or infinity for no limit."""
    # Each choice depends on the counts before it, but a small error in them affects only a few choices. So
    # all blocks start from estimated counts, and are computed again until each starts from the exact ones.
    steps = first + _BLOCK_STEPS * np.arange(num_blocks)
    starts = np.array([_guess_counts(weights, step) for step in steps.tolist()])
    starts[0] = taken
    ends = np.empty_like(starts)
    chosen = np.empty((_BLOCK_STEPS, num_blocks), np.int16)
    stale = np.arange(num_blocks)
    while stale.size:
        chosen[:, stale], ends[stale] = _choose_in_blocks(weights, limits, steps[stale], starts[stale])
        stale = 1 + np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1))
        starts[stale] = ends[stale - 1]
    return chosen.T.reshape(-1)


def _guess_counts(weights: np.ndarray, step: int) -> np.ndarray:
    """Estimate how many of the first ``step`` samples of a blend come from each corpus. Returns integers
    close to ``weights * step`` that sum to ``step``."""
    shares = weights * step
    taken = np.floor(shares)
    missing = step - int(taken.sum())
    taken[np.argsort(taken - shares, kind="stable")[:missing]] += 1.0
    return taken


def _choose_in_blocks(
    weights: np.ndarray, limits: np.ndarray, steps: np.ndarray, taken: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the corpus of each sample in several blocks, which are computed in parallel. A block is
    `_BLOCK_STEPS` consecutive samples of the blend.

    Args:
        limits: the size of each corpus, or infinity for no limit.
        steps: the first sample of each block.
        taken: the number of samples taken from each corpus before each block, [blocks, corpora].

    Returns the chosen corpora [_BLOCK_STEPS, blocks], and ``taken``, to which the samples of each block have
    been added in place.
    """
    blocks = np.arange(steps.shape[0])
    chosen = np.empty((_BLOCK_STEPS, steps.shape[0]), np.int16)
    behind = np.empty_like(taken)
    is_limited = bool(np.isfinite(limits).any())
    for j in range(_BLOCK_STEPS):
        # Sample k is from the corpus with the largest weight * max(k, 1) - taken, the first on ties.
        np.multiply(np.maximum(steps + j, 1)[:, None], weights, out=behind)
        behind -= taken
        if is_limited:
            behind[taken >= limits] = -np.inf
        chosen[j] = corpus = behind.argmax(axis=1)
        taken[blocks, corpus] += 1.0
    return chosen, taken


def normalize(weights: Sequence[float]) -> list[float]:
    values = np.array(weights, np.float64)
    return (values / np.sum(values)).tolist()


def blend_sizes(weights: Sequence[float], num_samples: int) -> tuple[int, list[int]]:
    """Return the number of samples in a weighted blend, and the number of samples to prepare from each
    corpus. The first number is ``num_samples`` or, due to rounding, slightly more."""
    shares = [math.ceil(num_samples * weight) for weight in weights]
    return sum(shares), [math.ceil(share * (1 + SURPLUS)) for share in shares]


@dataclass(frozen=True)
class BlendOrder:
    """The order in which a blend takes samples from its corpora.

    Attributes:
        decisive: everything that determines the order. Fingerprints are computed from it.
        shares: the weight of each corpus, for messages.
        dataset_index: the corpus of each sample, int16 [samples].
        dataset_sample_index: the number of each sample within its corpus, int64 [samples].
    """

    decisive: list
    shares: list[float]
    dataset_index: np.ndarray
    dataset_sample_index: np.ndarray

    @property
    def counts(self) -> list[int]:
        return np.bincount(self.dataset_index, minlength=len(self.shares)).tolist()


def weighted_order(weights: Sequence[float], num_samples: int, cache_dir: Path) -> BlendOrder:
    """Return the order of a blend with given weights (`blending_indices`), cached in ``cache_dir``."""
    weights = list(weights)
    build = partial(blending_indices, weights, num_samples)
    return _order([weights], weights, num_samples, cache_dir, build)


def exhaustive_order(sizes: Sequence[int], num_samples: int, cache_dir: Path) -> BlendOrder:
    """Return the order of the first ``num_samples`` samples of a blend that takes every sample once
    (`exhaustive_indices`), cached in ``cache_dir``."""
    sizes, num_samples = list(sizes), min(num_samples, sum(sizes))
    build = partial(exhaustive_indices, sizes, num_samples)
    return _order(["exhaustive", sizes], normalize(sizes), num_samples, cache_dir, build)


def _order(
    decisive: list,
    shares: list[float],
    num_samples: int,
    cache_dir: Path,
    build: Callable[[], tuple[np.ndarray, np.ndarray]],
) -> BlendOrder:
    names = ("dataset_index", "dataset_sample_index")
    arrays = load_or_build(
        cache_dir,
        f"blend_{_fingerprint([BLEND_VERSION, *decisive, num_samples])}",
        names,
        lambda: dict(zip(names, build(), strict=True)),
        num_bytes=_BYTES_PER_SAMPLE * num_samples,
    )
    return BlendOrder(decisive, shares, **arrays)


class BlendedDataset:
    """Mixes the samples of several datasets in the order of a `BlendOrder`. If ``tells_sources`` is True,
    each sample also has ``source_ids``, int64 []: the index of its corpus in `sources`."""

    def __init__(self, datasets: Sequence[GPTDataset], order: BlendOrder) -> None:
        assert len(datasets) == len(order.shares)
        assert all(len(dataset) >= n for dataset, n in zip(datasets, order.counts, strict=True))
        self.datasets, self.order, self.tells_sources = list(datasets), order, False
        decisive = [BLEND_VERSION, *order.decisive, [d.fingerprint for d in datasets]]
        self.fingerprint = _fingerprint(decisive)

    def __len__(self) -> int:
        return self.order.dataset_index.shape[0]

    @property
    def samples_per_epoch(self) -> float:
        return sum(dataset.samples_per_epoch for dataset in self.datasets)

    def __getitem__(self, index: int) -> Sample:
        """Return the sample at position ``index`` of the blend. The sample has the same arrays as in its own
        dataset, except that ``sample_ids`` is ``index``. The index `PADDING` gives a sample whose loss mask
        is 0."""
        if index == PADDING:
            return self._from(0, self.datasets[0][PADDING])
        order = self.order
        source = int(order.dataset_index[index])
        sample = self.datasets[source][int(order.dataset_sample_index[index])]
        sample["sample_ids"] = np.array(index, np.int64)
        return self._from(source, sample)

    def _from(self, source: int, sample: Sample) -> Sample:
        return {**sample, "source_ids": np.array(source, np.int64)} if self.tells_sources else sample

    @property
    def sources(self) -> list[str]:
        """The names of the corpora, indexed by ``source_ids``. A name is the last component of the corpus's
        path. If two corpora have the same last component, all names are whole paths without suffix.
        """
        prefixes = [dataset.corpus.prefix for dataset in self.datasets]
        names = [Path(prefix).name for prefix in prefixes]
        return names if len({*names}) == len(names) else prefixes

    def describe(self) -> str:
        shares = ", ".join(f"{100 * weight:.2f}%" for weight in self.order.shares)
        lines = [dataset.describe() for dataset in self.datasets]
        blend = f"blend of {counted(len(lines), 'corpus')}: {shares}; {counted(len(self), 'sample', ',')}"
        return "\n".join([*lines, blend])


def _fingerprint(decisive: list) -> str:
    return hashlib.blake2b(json.dumps(decisive).encode(), digest_size=16).hexdigest()
