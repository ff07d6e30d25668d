"""The samples of a step depend only on consumed samples and the global batch size."""

import numpy as np
import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.data.loader import GlobalBatchSampler


def steps_of(sampler: GlobalBatchSampler, num: int) -> list[list[list[int]]]:
    batches = iter(sampler)
    return [[micro.tolist() for micro in next(batches)] for _ in range(num)]


def test_layout_of_micro_batches_and_ranks() -> None:
    """Consecutive chunks of micro batch x ranks, each rank taking its part of each chunk."""
    assert steps_of(GlobalBatchSampler(100, 8, 2, 0, 2, 16), 1) == [[[16, 17], [20, 21]]]
    assert steps_of(GlobalBatchSampler(100, 8, 2, 1, 2, 16), 1) == [[[18, 19], [22, 23]]]


@pytest.mark.parametrize("shuffle_seed", [None, 3])
@pytest.mark.parametrize(("data_size", "micro"), [(1, 8), (1, 4), (2, 2), (4, 1), (8, 1), (2, 4), (1, 1)])
def test_a_step_is_the_same_set_for_every_plan(data_size: int, micro: int, shuffle_seed: int | None) -> None:
    reference = GlobalBatchSampler(30, 8, 8, consumed_samples=5, shuffle_seed=shuffle_seed)
    ranks = [
        GlobalBatchSampler(30, 8, micro, rank, data_size, 5, shuffle_seed=shuffle_seed)
        for rank in range(data_size)
    ]
    for step in range(12):  # beyond the end of the data
        together = np.concatenate([np.concatenate(rank.micro_batches(step)) for rank in ranks])
        assert sorted(together) == sorted(reference.global_batch(step))
        assert all(len(rank.micro_batches(step)) == 8 // micro // data_size for rank in ranks)


def test_wrapping_starts_again_inside_a_batch() -> None:
    sampler = GlobalBatchSampler(10, 4, 4)
    assert sampler.num_steps is None
    assert steps_of(sampler, 4) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 0, 1]], [[2, 3, 4, 5]]]
    assert steps_of(GlobalBatchSampler(3, 4, 4), 1) == [[[0, 1, 2, 0]]]


@pytest.mark.parametrize(
    ("total", "drop", "pad"),
    [
        (10, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, -1, -1]]),
        (8, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (3, [], [[0, 1, 2, -1]]),
    ],
)
def test_ends_of_an_evaluation(total: int, drop: list, pad: list) -> None:
    for tail, expected in (("drop", drop), ("pad", pad)):
        sampler = GlobalBatchSampler(total, 4, 4, tail=tail)
        assert [step[0].tolist() for step in sampler] == expected
        assert sampler.num_steps == len(expected)
    ranks = [GlobalBatchSampler(total, 4, 1, rank, 4, tail="pad") for rank in range(4)]
    assert all(len(list(rank)) == len(pad) for rank in ranks), "ranks must take the same number of steps"


def test_sizes_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="8 samples cannot be shared by 3 data ranks in micro batches of 1"):
        GlobalBatchSampler(10, 8, 1, 0, 3)
