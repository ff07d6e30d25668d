"""The batches of one data rank: a sampler that divides the samples of each step among the ranks, and a loader
that reads them in threads.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.message_text import counted
from ppfleetx.data.gpt_dataset import PADDING, Sample
from ppfleetx.resilience.flight_recorder import RECORD

Tail = Literal["wrap", "drop", "pad"]


class GlobalBatchSampler:
    """Divides the samples of each step among the data ranks. With D data ranks and micro batches of b
    samples, micro batch m of rank r has positions ``(m D + r) b + [0, b)`` of the global batch.

    Args:
        total: number of samples in the dataset.
        size_at: returns the batch size of the next step, given the number of consumed samples. None: the size
            is constant.
        tail: what happens at the end of the dataset. ``"wrap"``: the first sample follows the last.
            ``"drop"``: an incomplete last batch is left out. ``"pad"``: the index `PADDING` fills this batch.
        shuffle_seed: seed of a new permutation for every pass over the dataset. None: the dataset's own
            order.

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
        self.size_at = size_at or (lambda _: global_batch_size)
        self.start_after(0)
        self.tail: Tail = tail
        self.shuffle_seed = shuffle_seed
        self._pass, self._permutation = -1, np.empty(0, np.int64)

    def start_after(self, consumed_samples: int, data_start: int = 0) -> None:
        """Set which step is step 0: the one after the first ``consumed_samples`` samples of the run.
        ``data_start`` is the number of samples that the run had consumed when it began to read this dataset.
        """
        self.consumed_samples, self._firsts = consumed_samples, [consumed_samples]
        self.data_start = data_start

    @property
    def num_steps(self) -> int | None:
        if self.tail == "wrap":
            return None
        left = max(0, self.total + self.data_start - self.consumed_samples)
        return left // self.global_batch_size if self.tail == "drop" else -(-left // self.global_batch_size)

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        """Yield this data rank's micro batches of each step, as arrays of sample indices, int64 [b]."""
        step, num_steps = 0, self.num_steps
        while num_steps is None or step < num_steps:
            yield self.micro_batches(step)
            step += 1

    def micro_batches(self, step: int) -> list[np.ndarray]:
        """Return this data rank's micro batches of a step, as arrays of sample indices. Step 0 is the first
        step after ``consumed_samples``."""
        batch = self.global_batch(step).reshape(-1, self.data_size, self.micro_batch_size)
        return list(batch[:, self.data_rank])

    def global_batch(self, step: int) -> np.ndarray:
        """Return the sample indices of all data ranks in a step, int64 [global batch size]. Step 0 is the
        first step after ``consumed_samples``."""
        while len(self._firsts) <= step:
            self._firsts.append(self._firsts[-1] + self.size_at(self._firsts[-1]))
        first = self._firsts[step]
        positions = first - self.data_start + np.arange(self.size_at(first), dtype=np.int64)
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
    """Return micro batches cut to the first ``length`` tokens: arrays ``[b, s]`` become ``[b, length]``. The
    result shares memory with the given arrays, which are not changed."""
    return [
        {name: array[:, :length] if array.ndim > 1 else array for name, array in batch.items()}
        for batch in micro_batches
    ]


_THREADS = "data"
_PREFETCH_PER_WORKER = 2  # steps that each thread prepares in advance


@runtime_checkable
class Dataset(Protocol):
    """The interface of datasets. Samples are numbered from 0; the index `PADDING` (-1) gives a sample without
    loss. ``fingerprint`` is a hash of everything that determines the samples and their order; a resumed run
    requires the same fingerprint."""

    fingerprint: str

    def __len__(self) -> int: ...
    @property
    def samples_per_epoch(self) -> float:
        """The number of samples in one pass over the data, which need not be an integer."""

    def describe(self) -> str:
        """Describe the dataset in a few lines for the log."""

    def __getitem__(self, index: int) -> Sample:
        """Return the arrays of sample ``index``: ``tokens``, ``labels``, ``position_ids`` int64 [s],
        ``loss_mask`` float32 [s] (all 0 if ``index`` is `PADDING`), ``sample_ids`` int64 [] (the index). Must
        be thread-safe.

        To support `Engine.log_source_loss`, a dataset must have an attribute ``sources`` with the names of
        its sources, and its samples must have ``source_ids`` int64 [], an index into ``sources``.
        """


def collate(samples: Sequence[Sample]) -> MicroBatch:
    """Stack samples into a micro batch: arrays ``[s]`` become ``[b, s]``, and single numbers such as
    ``sample_ids`` become ``[b]``."""
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def trim_padding(micro_batches: list[MicroBatch], multiple: int) -> list[MicroBatch]:
    """Cut the padding at the end of one data rank's micro batches of a step. All micro batches get the same
    length: that of the longest sample in any of them, rounded up to a multiple of ``multiple``. The array
    ``lengths`` of a micro batch has the lengths of its samples without padding. Data ranks can end up with
    different lengths."""
    # A pipeline requires the same length for all micro batches of a step.
    longest = max(int(batch["lengths"].max()) for batch in micro_batches)
    return shortened(micro_batches, -(-longest // multiple) * multiple)


class DataLoader:
    """Reads the batches of one data rank. Iterating yields a list of micro batches for each step, from
    the sampler's step 0 on. ``num_workers`` threads read steps in advance."""

    def __init__(self, dataset: Dataset, sampler: GlobalBatchSampler, num_workers: int = 0) -> None:
        self.dataset, self.sampler, self.num_workers = dataset, sampler, num_workers

    @property
    def fingerprint(self) -> str:
        """A hash of the order in which samples are read. Resuming with another order would skip some samples
        and repeat others.
        """
        if self.sampler.shuffle_seed is None:
            return self.dataset.fingerprint
        decisive = f"{self.dataset.fingerprint} {self.sampler.shuffle_seed} {self.sampler.total}"
        return hashlib.blake2b(decisive.encode(), digest_size=16).hexdigest()

    @property
    def samples_per_epoch(self) -> float:
        return self.dataset.samples_per_epoch

    @property
    def sources(self) -> list[str]:
        """The names of the corpora that the dataset mixes, indexed by ``source_ids``. Empty if the dataset
        does not name its sources.
        """
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
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix=_THREADS)
        try:
            ahead = islice(steps, self.num_workers * _PREFETCH_PER_WORKER)
            pending: deque[Future] = deque(pool.submit(self._load, step) for step in ahead)
            while pending:
                with RECORD.awaiting(_THREADS):
                    batch = pending.popleft().result()
                pending.extend(pool.submit(self._load, step) for step in islice(steps, 1))
                yield batch
        finally:
            # Also reached on Ctrl-C and when the caller stops iterating: cancel steps that are still pending.
            pool.shutdown(wait=True, cancel_futures=True)
