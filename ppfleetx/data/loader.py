"""From the configuration to batches: corpora, their order, and threads that prepare what comes next."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from ppfleetx.data.blended import BlendedDataset
from ppfleetx.data.build import Mode, build_dataset
from ppfleetx.data.gpt_dataset import GPTDataset, Sample
from ppfleetx.data.sampler import GlobalBatchSampler, Tail
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.config.sections import RunConfig

MicroBatch = dict[str, np.ndarray]

_PREFETCH_PER_WORKER = 2  # steps prepared ahead by each thread


def collate(samples: Sequence[Sample]) -> MicroBatch:
    """Samples stacked to arrays [b, s] (``sample_ids`` [b])."""
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


class DataLoader:
    """Iterates over steps; each is the list of this data rank's micro batches as NumPy arrays.

    Iterating again starts again at the sampler's first step, so every evaluation sees the same batches.

    Args:
        dataset: where samples come from.
        sampler: which of them, and when.
        num_workers: threads that prepare steps ahead of time, in order; 0: none, the caller's thread does it.
    """

    def __init__(
        self, dataset: GPTDataset | BlendedDataset, sampler: GlobalBatchSampler, num_workers: int = 0
    ) -> None:
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

    def describe(self) -> str:
        """What is read, in how many epochs, for people."""
        return self.dataset.describe()

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self._prefetch() if self.num_workers else map(self._load, self.sampler)

    def _load(self, micro_batches: list[np.ndarray]) -> list[MicroBatch]:
        return [collate([self.dataset[index] for index in indices.tolist()]) for indices in micro_batches]

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


def build_dataloader(
    cfg: RunConfig,
    mode: Mode,
    data_rank: int = 0,
    data_size: int = 1,
    consumed_samples: int = 0,
    *,
    eod_id: int | None = None,
) -> DataLoader:
    """Batches of ``Data.<mode>`` for one data rank.

    Train goes on for ever from ``consumed_samples``; past the last prepared sample it starts again from the
    first. Eval and Test are the first ``eval_iters`` (``test_iters``) global batches, the same each time the
    loader is iterated, so that losses can be compared. With ``sampler.drop_last: False`` they end with the
    split, and the last batch is filled up with samples of zero loss mask: none counts twice.

    Args:
        eod_id: end-of-document token where the section names none.

    Raises:
        ConfigError, DataError: see `ppfleetx.data.build.build_dataset`.
    """
    section, batch = getattr(cfg.Data, mode), cfg.batch
    dataset = build_dataset(cfg, mode, eod_id=eod_id)
    tail: Tail = "wrap"
    total = len(dataset)
    if mode != "Train":
        engine = cfg.Engine
        num_batches = engine.eval_iters if mode == "Eval" else engine.test_iters or 10 * engine.eval_iters
        total = min(total, num_batches * batch.global_batch_size)
        tail = "drop" if section.sampler.drop_last else "pad"
    seed = cfg.Global.seed if section.dataset.seed is None else section.dataset.seed
    sampler = GlobalBatchSampler(
        total,
        batch.global_batch_size,
        batch.micro_batch_size,
        data_rank,
        data_size,
        consumed_samples if mode == "Train" else 0,
        tail=tail,
        shuffle_seed=seed if section.sampler.shuffle else None,
    )
    loader = DataLoader(dataset, sampler, section.loader.num_workers)
    for line in loader.describe().splitlines():
        get_logger().info(line)
    return loader
