"""Batches of one data rank, prepared ahead by threads."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np

from ppfleetx.data.gpt_dataset import Sample
from ppfleetx.data.sampler import GlobalBatchSampler

MicroBatch = dict[str, np.ndarray]
"""Arrays of a micro batch by name, on the host."""

_PREFETCH_PER_WORKER = 2  # steps prepared ahead by each thread


@runtime_checkable
class Dataset(Protocol):
    """Samples by number, 0 to ``len - 1``; `PADDING` (-1) gives one that counts nowhere.

    Attributes:
        fingerprint: hash of all that decides the samples and their order; a run that resumes refuses another.
    """

    fingerprint: str

    def __len__(self) -> int:
        """How many samples there are."""

    @property
    def samples_per_epoch(self) -> float:
        """Samples in one pass."""

    def describe(self) -> str:
        """What is read, for people."""

    def __getitem__(self, index: int) -> Sample:
        """Arrays of one sample: ``tokens``, ``labels``, ``position_ids`` int64 [s], ``loss_mask`` float32 [s]
        (all 0 for `PADDING`), ``sample_ids`` int64 [] (the index). Several threads call this at once.

        Where samples come from several sources, an attribute ``sources`` names them, and each sample has
        ``source_ids`` int64 [], its place in that list: `Engine.log_source_loss` tells their losses apart."""


def collate(samples: Sequence[Sample]) -> MicroBatch:
    """Samples stacked to arrays [b, s] (``sample_ids`` [b])."""
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def without_padding(micro_batches: list[MicroBatch], multiple: int) -> list[MicroBatch]:
    """Batches cut after the longest of their sequences (``lengths``), to a multiple of ``multiple``.

    One length for all micro batches of a step: a pipeline wants them equal.
    """
    longest = max(int(batch["lengths"].max()) for batch in micro_batches)
    end = -(-longest // multiple) * multiple
    return [
        {name: array if array.ndim < 2 else array[:, :end] for name, array in batch.items()}
        for batch in micro_batches
    ]


class DataLoader:
    """Iterates over steps; each is the list of this data rank's micro batches as NumPy arrays.

    Iterating again starts again at the sampler's first step, so every evaluation sees the same batches.

    Args:
        dataset: where samples come from.
        sampler: which of them, and when.
        num_workers: threads that prepare steps ahead of time, in order; 0: none, the caller's thread does it.
    """

    def __init__(self, dataset: Dataset, sampler: GlobalBatchSampler, num_workers: int = 0) -> None:
        self.dataset, self.sampler, self.num_workers = dataset, sampler, num_workers

    @property
    def fingerprint(self) -> str:
        """Hash of the order of samples. A run that resumes with another one would skip and repeat data."""
        if self.sampler.shuffle_seed is None:
            return self.dataset.fingerprint
        decisive = f"{self.dataset.fingerprint} {self.sampler.shuffle_seed} {self.sampler.total}"
        return hashlib.blake2b(decisive.encode(), digest_size=16).hexdigest()

    @property
    def samples_per_epoch(self) -> float:
        """Samples in one pass over the text of the split."""
        return self.dataset.samples_per_epoch

    @property
    def sources(self) -> list[str]:
        """What ``source_ids`` number; empty where samples do not say where they come from."""
        return list(getattr(self.dataset, "sources", ()))

    def describe(self) -> str:
        """What is read, in how many epochs, for people."""
        return self.dataset.describe()

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self._prefetch() if self.num_workers else map(self._load, self.sampler)

    def _load(self, micro_batches: list[np.ndarray]) -> list[MicroBatch]:
        batches = [collate([self.dataset[index] for index in indices.tolist()]) for indices in micro_batches]
        multiple = getattr(self.dataset, "length_multiple", None)
        return batches if multiple is None else without_padding(batches, multiple)

    def _prefetch(self) -> Iterator[list[MicroBatch]]:
        steps = iter(self.sampler)
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="data")
        try:
            ahead = islice(steps, self.num_workers * _PREFETCH_PER_WORKER)
            pending: deque[Future] = deque(pool.submit(self._load, step) for step in ahead)
            while pending:
                batch = pending.popleft().result()
                pending.extend(pool.submit(self._load, step) for step in islice(steps, 1))
                yield batch
        finally:
            # Also on Ctrl-C and when the caller stops iterating: what was prepared ahead is dropped.
            pool.shutdown(wait=True, cancel_futures=True)
