"""Batches of one data rank: a sampler that distributes samples, and a loader that prepares batches in
threads."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.formatting import counted
from ppfleetx.data.gpt_dataset import PADDING, Sample

Tail = Literal["wrap", "drop", "pad"]


class GlobalBatchSampler:
    """Distributes global batches of consecutive samples among the data ranks.

    Global batch k holds positions ``consumed_samples + [k B, (k + 1) B)`` of the dataset's order. Micro batch
    m of data rank r holds positions ``(m D + r) b + [0, b)`` of the global batch (b: micro batch size, D:
    number of data ranks), so D and b do not affect which samples a step trains on.

    Args:
        consumed_samples: number of samples already used. Every iteration starts after them.
        size_at: for a batch size that changes, a function from consumed samples to the size of the next
            step. None: the size is always B.
        tail: behavior at the end of the dataset. ``"wrap"``: the first sample follows the last (position
            modulo total), without end. ``"drop"``: leave out the last incomplete batch. ``"pad"``: fill it
            with index -1, whose sample has loss mask 0.
        shuffle_seed: seed of the order. Every pass over the dataset has its own permutation, drawn from
            (seed, number of the pass). None: the dataset's own order.

    Raises:
        ConfigError: the global batch is not divisible by micro batch size x data ranks.
    """

    def __init__(
        self,
        total: int,
        global_batch_size: int,
        micro_batch_size: int,
        data_rank: int = 0,
        data_size: int = 1,
        consumed_samples: int = 0,
        *,
        size_at: Callable[[int], int] | None = None,
        tail: Tail = "wrap",
        shuffle_seed: int | None = None,
    ) -> None:
        if global_batch_size % (micro_batch_size * data_size):
            raise ConfigError(
                f"{counted(global_batch_size, 'sample')} cannot be shared by "
                f"{counted(data_size, 'data rank')} in micro batches of {micro_batch_size}",
                key="Global.global_batch_size",
            )
        assert 0 <= data_rank < data_size
        assert total > 0
        self.total = total
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.data_rank, self.data_size = data_rank, data_size
        self.consumed_samples = consumed_samples
        self.size_at = size_at or (lambda _: global_batch_size)
        self._firsts = [consumed_samples]
        self.tail: Tail = tail
        self.shuffle_seed = shuffle_seed
        self._pass, self._permutation = -1, np.empty(0, np.int64)

    @property
    def num_steps(self) -> int | None:
        if self.tail == "wrap":
            return None
        left = max(0, self.total - self.consumed_samples)
        return left // self.global_batch_size if self.tail == "drop" else -(-left // self.global_batch_size)

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        """Yield this rank's micro batches of each step, as arrays of sample indices, int64 [b]."""
        step, num_steps = 0, self.num_steps
        while num_steps is None or step < num_steps:
            yield self.micro_batches(step)
            step += 1

    def micro_batches(self, step: int) -> list[np.ndarray]:
        """Return this rank's micro batches of a step. Steps are counted from `consumed_samples`."""
        batch = self.global_batch(step).reshape(-1, self.data_size, self.micro_batch_size)
        return list(batch[:, self.data_rank])

    def global_batch(self, step: int) -> np.ndarray:
        """Return the sample indices of all ranks in a step, int64 [B]."""
        while len(self._firsts) <= step:
            self._firsts.append(self._firsts[-1] + self.size_at(self._firsts[-1]))
        first = self._firsts[step]
        positions = np.arange(first, first + self.size_at(first), dtype=np.int64)
        if self.tail == "wrap":
            return self._visit(positions)
        return np.where(positions < self.total, self._visit(positions), PADDING)

    def _visit(self, positions: np.ndarray) -> np.ndarray:
        indices = positions % self.total
        if self.shuffle_seed is None:
            return indices
        passes = positions // self.total
        for number in np.unique(passes).tolist():
            here = passes == number
            indices[here] = self._order_of_pass(number)[indices[here]]
        return indices

    def _order_of_pass(self, number: int) -> np.ndarray:
        if number != self._pass:
            generator = np.random.default_rng([self.shuffle_seed, number])
            self._pass, self._permutation = number, generator.permutation(self.total)
        return self._permutation


MicroBatch = dict[str, np.ndarray]
"""The NumPy arrays of a micro batch, by name."""


def shortened(micro_batches: Sequence[MicroBatch], length: int) -> list[MicroBatch]:
    """Return the first ``length`` tokens of each sequence: arrays ``[b, s]`` become ``[b, length]``."""
    return [
        {name: array[:, :length] if array.ndim > 1 else array for name, array in batch.items()}
        for batch in micro_batches
    ]


_PREFETCH_PER_WORKER = 2  # steps that each thread prepares in advance


@runtime_checkable
class Dataset(Protocol):
    """The interface of datasets: samples numbered from 0 to ``len - 1``, and a padding sample `PADDING` (-1).

    ``fingerprint`` is a hash of everything that determines the samples and their order. A resumed run rejects
    a dataset with a different fingerprint.
    """

    fingerprint: str

    def __len__(self) -> int: ...
    @property
    def samples_per_epoch(self) -> float:
        """The number of samples in one pass."""

    def describe(self) -> str:
        """Describe the dataset in a few lines for the log."""

    def __getitem__(self, index: int) -> Sample:
        """Return the arrays of one sample: ``tokens``, ``labels``, ``position_ids`` int64 [s], ``loss_mask``
        float32 [s] (all 0 for `PADDING`), ``sample_ids`` int64 [] (the index). Must be thread-safe.

        For `Engine.log_source_loss`, a dataset with several sources also has an attribute ``sources`` with
        their names, and each sample has ``source_ids`` int64 [], an index into ``sources``.
        """


def collate(samples: Sequence[Sample]) -> MicroBatch:
    """Stack samples into arrays [b, s] (``sample_ids``: [b])."""
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def trim_padding(micro_batches: list[MicroBatch], multiple: int) -> list[MicroBatch]:
    """Cut all micro batches of a step to their longest sequence (``lengths``), rounded up to a multiple. All
    micro batches of a step get the same length, because a pipeline requires it."""
    longest = max(int(batch["lengths"].max()) for batch in micro_batches)
    return shortened(micro_batches, -(-longest // multiple) * multiple)


class DataLoader:
    """Iterates over steps. Each step is a list of this data rank's micro batches as NumPy arrays.

    Every iteration starts at the sampler's first step, so every evaluation sees the same batches.
    ``num_workers`` threads prepare steps in advance; with 0, the caller's thread prepares them.
    """

    def __init__(self, dataset: Dataset, sampler: GlobalBatchSampler, num_workers: int = 0) -> None:
        self.dataset, self.sampler, self.num_workers = dataset, sampler, num_workers

    @property
    def fingerprint(self) -> str:
        """A hash of the order of samples. A run resumed with a different order would skip and repeat data."""
        if self.sampler.shuffle_seed is None:
            return self.dataset.fingerprint
        decisive = f"{self.dataset.fingerprint} {self.sampler.shuffle_seed} {self.sampler.total}"
        return hashlib.blake2b(decisive.encode(), digest_size=16).hexdigest()

    @property
    def samples_per_epoch(self) -> float:
        return self.dataset.samples_per_epoch

    @property
    def sources(self) -> list[str]:
        """The names of the sources, indexed by ``source_ids``. Empty if samples have no source."""
        return list(getattr(self.dataset, "sources", ()))

    def describe(self) -> str:
        return self.dataset.describe()

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self._prefetch() if self.num_workers else map(self._load, self.sampler)

    def _load(self, micro_batches: list[np.ndarray]) -> list[MicroBatch]:
        batches = [collate([self.dataset[index] for index in indices.tolist()]) for indices in micro_batches]
        multiple = getattr(self.dataset, "length_multiple", None)
        return batches if multiple is None else trim_padding(batches, multiple)

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
            # Also reached on Ctrl-C and when the caller stops iterating: cancel steps that are still pending.
            pool.shutdown(wait=True, cancel_futures=True)
