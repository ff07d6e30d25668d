"""Several corpora read as one, in given proportions."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ppfleetx.config.errors import DataError
from ppfleetx.data.gpt_dataset import PADDING, GPTDataset, Sample
from ppfleetx.data.index_cache import load_or_build

BLEND_VERSION = 1
"""Changes when equal weights would give another order than before."""

SURPLUS = 0.005
"""Each corpus prepares this much more than its share, since the greedy order may run ahead of it."""


def blending_indices(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which corpus each sample comes from, and its number within that corpus.

    Sample k is taken from the corpus that is furthest behind its share, the one with the largest
    ``weight * max(k, 1) - taken``, the first of equals: the rule of Megatron-LM's ``helpers.cpp``, in the
    same double precision, so the orders are equal.

    Returns:
        int16 [size] and int64 [size].
    """
    shares, taken = np.array(weights, np.float64), np.zeros(len(weights), np.float64)
    chosen = np.empty(size, np.int16)
    numbers = np.empty(size, np.int64)
    for k in range(size):
        corpus = int(np.argmax(shares * max(k, 1) - taken))
        chosen[k], numbers[k] = corpus, taken[corpus]
        taken[corpus] += 1
    return chosen, numbers


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
        )
        self._dataset_index = arrays["dataset_index"]
        self._dataset_sample_index = arrays["dataset_sample_index"]
        self._check_counts()

    def _check_counts(self) -> None:
        counts = np.bincount(self._dataset_index, minlength=len(self.datasets))
        for dataset, count in zip(self.datasets, counts.tolist(), strict=True):
            if count > len(dataset):
                raise DataError(
                    f"{dataset.corpus.prefix}: the blend takes {count} samples, but only {len(dataset)} "
                    "were prepared"
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
        return "\n".join([*lines, f"blend of these {len(lines)} corpora: {shares}; {len(self):,} samples"])


def _fingerprint(decisive: list) -> str:
    return hashlib.blake2b(json.dumps(decisive).encode(), digest_size=16).hexdigest()
