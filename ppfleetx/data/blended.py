"""Several corpora read as one, in given proportions."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ppfleetx.config.counts import counted
from ppfleetx.config.errors import DataError
from ppfleetx.data.gpt_dataset import PADDING, GPTDataset, Sample
from ppfleetx.data.index_cache import load_or_build

BLEND_VERSION = 1
"""Changes when equal weights would give another order than before."""

SURPLUS = 0.005
"""Each corpus prepares this much more than its share, since the greedy order may run ahead of it."""


_BYTES_PER_SAMPLE = 2 + 8 + 3 * 8  # the two arrays, and what they are made with
_BLOCK_STEPS, _NUM_BLOCKS = 2048, 1024  # steps of a block, blocks walked side by side


def blending_indices(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which corpus each sample comes from, and its number within that corpus.

    Sample k is taken from the corpus that is furthest behind its share, the one with the largest
    ``weight * max(k, 1) - taken``, the first of equals: the rule of Megatron-LM's ``helpers.cpp``, in the
    same double precision, so the orders are equal.

    Args:
        weights: normalised.

    Returns:
        int16 [size] and int64 [size].
    """
    shares = np.array(weights, np.float64)
    chosen = np.empty(size, np.int16)
    taken = np.zeros(len(shares))
    for first in range(0, size, _NUM_BLOCKS * _BLOCK_STEPS):
        part = chosen[first : first + _NUM_BLOCKS * _BLOCK_STEPS]
        num_blocks = -(-part.shape[0] // _BLOCK_STEPS)
        part[:] = _choose(shares, first, num_blocks, taken)[: part.shape[0]]
        taken += np.bincount(part, minlength=len(shares))
    by_corpus = np.argsort(chosen, kind="stable")
    counts = np.bincount(chosen, minlength=len(shares))
    numbers = np.empty(size, np.int64)
    numbers[by_corpus] = np.arange(size) - np.repeat(np.cumsum(counts) - counts, counts)
    return chosen, numbers


def _choose(weights: np.ndarray, first: int, num_blocks: int, taken: np.ndarray) -> np.ndarray:
    """The choices of so many blocks of steps from ``first`` on, ``taken`` being known there.

    The rule cannot be evaluated out of order, but it soon forgets where it started. So many blocks are walked
    side by side, each but the first from a guess; then each is walked again from where its predecessor really
    ended, until no start changes. What is left then is the exact sequence: each block starts where the one
    before ends, and the first one started right. Two or three rounds are the rule.
    """
    steps = first + _BLOCK_STEPS * np.arange(num_blocks)
    starts = np.array([_near_shares(weights, step) for step in steps.tolist()])
    starts[0] = taken
    ends = np.empty_like(starts)
    chosen = np.empty((_BLOCK_STEPS, num_blocks), np.int16)
    stale = np.arange(num_blocks)
    while stale.size:
        chosen[:, stale], ends[stale] = _walk(weights, steps[stale], starts[stale])
        stale = 1 + np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1))
        starts[stale] = ends[stale - 1]
    return chosen.T.reshape(-1)


def _near_shares(weights: np.ndarray, step: int) -> np.ndarray:
    """Whole numbers close to ``weights * step`` that sum to ``step``, as the samples taken by then do."""
    shares = weights * step
    taken = np.floor(shares)
    missing = step - int(taken.sum())
    taken[np.argsort(taken - shares, kind="stable")[:missing]] += 1.0
    return taken


def _walk(weights: np.ndarray, steps: np.ndarray, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Follow the rule for one block from each of ``steps``, side by side.

    Returns:
        Choices [_BLOCK_STEPS, blocks], and samples taken [blocks, corpora] at the end.
    """
    blocks = np.arange(steps.shape[0])
    chosen = np.empty((_BLOCK_STEPS, steps.shape[0]), np.int16)
    behind = np.empty_like(taken)
    for j in range(_BLOCK_STEPS):
        np.multiply(np.maximum(steps + j, 1)[:, None], weights, out=behind)
        behind -= taken
        chosen[j] = corpus = behind.argmax(axis=1)
        taken[blocks, corpus] += 1.0
    return chosen, taken


def normalise(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, as Megatron-LM does before blending."""
    values = np.array(weights, np.float64)
    return (values / np.sum(values)).tolist()


def blend_sizes(weights: Sequence[float], num_samples: int) -> tuple[int, list[int]]:
    """Samples of the blend, and samples to prepare of each corpus (normalised weights)."""
    shares = [math.ceil(num_samples * weight) for weight in weights]
    return sum(shares), [math.ceil(share * (1 + SURPLUS)) for share in shares]


class BlendedDataset:
    """One dataset made of several, sample by sample in the proportions of their weights.

    Args:
        datasets: at most 32767, each built for the size `blend_sizes` gives.
        weights: normalised.
        num_samples: samples of the blend.
        cache_dir: where the order is kept.

    Raises:
        DataError: a corpus has fewer samples than the blend takes from it.
    """

    def __init__(
        self, datasets: Sequence[GPTDataset], weights: Sequence[float], num_samples: int, cache_dir: Path
    ) -> None:
        assert len(datasets) == len(weights) <= np.iinfo(np.int16).max
        self.datasets, self.weights = list(datasets), list(weights)
        self.fingerprint = _fingerprint([BLEND_VERSION, self.weights, [d.fingerprint for d in datasets]])
        arrays = load_or_build(
            cache_dir,
            f"blend_{_fingerprint([BLEND_VERSION, self.weights, num_samples])}",
            ("dataset_index", "dataset_sample_index"),
            lambda: dict(
                zip(
                    ("dataset_index", "dataset_sample_index"),
                    blending_indices(self.weights, num_samples),
                    strict=True,
                )
            ),
            {"weights": self.weights, "num_samples": num_samples},
            num_bytes=_BYTES_PER_SAMPLE * num_samples,
        )
        self._dataset_index = arrays["dataset_index"]
        self._dataset_sample_index = arrays["dataset_sample_index"]
        self._check_counts()

    def _check_counts(self) -> None:
        counts = np.bincount(self._dataset_index, minlength=len(self.datasets))
        for dataset, count in zip(self.datasets, counts.tolist(), strict=True):
            if count > len(dataset):
                raise DataError(
                    f"{dataset.corpus.prefix}: the blend takes {counted(count, 'sample', ',')}, but only "
                    f"{len(dataset)} were prepared"
                )

    def __len__(self) -> int:
        return self._dataset_index.shape[0]

    @property
    def samples_per_epoch(self) -> float:
        """Samples in one pass over all corpora."""
        return sum(dataset.samples_per_epoch for dataset in self.datasets)

    def __getitem__(self, index: int) -> Sample:
        """As `GPTDataset.__getitem__`; ``sample_ids`` counts in the order of the blend."""
        if index == PADDING:
            return self.datasets[0][PADDING]
        sample = self.datasets[self._dataset_index[index]][int(self._dataset_sample_index[index])]
        sample["sample_ids"] = np.array(index, np.int64)
        return sample

    def describe(self) -> str:
        """One line a corpus, then the blend."""
        shares = ", ".join(f"{100 * weight:.2f}%" for weight in self.weights)
        lines = [dataset.describe() for dataset in self.datasets]
        return "\n".join(
            [
                *lines,
                f"blend of {counted(len(lines), 'corpus')}: {shares}; {counted(len(self), 'sample', ',')}",
            ]
        )


def _fingerprint(decisive: list) -> str:
    return hashlib.blake2b(json.dumps(decisive).encode(), digest_size=16).hexdigest()
