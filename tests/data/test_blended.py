"""Blends: Megatron's greedy order, walked one by one and as computed in blocks."""

from pathlib import Path

import numpy as np
import pytest

from ppfleetx.config.errors import DataError
from ppfleetx.data.blended import BlendedDataset, blend_sizes, blending_indices, normalise
from ppfleetx.data.gpt_dataset import PADDING, GPTDataset, SampleOptions
from ppfleetx.data.indexed import IndexedDataset


def one_by_one(weights: list[float], size: int) -> tuple[list[int], list[int]]:
    taken = [0] * len(weights)
    chosen, numbers = [], []
    for k in range(size):
        behind = [weight * max(k, 1) - count for weight, count in zip(weights, taken, strict=True)]
        corpus = behind.index(max(behind))
        chosen.append(corpus)
        numbers.append(taken[corpus])
        taken[corpus] += 1
    return chosen, numbers


def test_the_order_megatron_gives() -> None:
    """Made with Megatron-LM d98e8a64, ``helpers.build_blending_indices``."""
    chosen, numbers = blending_indices([0.5, 0.3, 0.2], 12)
    assert chosen.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1]
    assert (chosen.dtype, numbers.dtype) == (np.int16, np.int64)
    assert numbers.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 5, 3]


@pytest.mark.parametrize("case", range(25))
def test_blocks_give_the_same_as_one_by_one(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(case)
    monkeypatch.setattr("ppfleetx.data.blended._BLOCK_STEPS", int(draw.integers(1, 60)))
    monkeypatch.setattr("ppfleetx.data.blended._NUM_BLOCKS", int(draw.integers(1, 40)))
    # Squares of squares make some corpora very rare; equal weights make every step a tie.
    shares = draw.dirichlet(np.ones(draw.integers(1, 30))) ** draw.choice([0, 1, 4])
    weights = normalise(shares)
    chosen, numbers = blending_indices(weights, int(draw.integers(0, 4000)))
    assert (chosen.tolist(), numbers.tolist()) == one_by_one(weights, len(chosen))


def test_blocks_of_the_real_size() -> None:
    weights = normalise([0.7, 0.2, 0.0999, 0.0001])
    chosen, numbers = blending_indices(weights, 20000)
    assert (chosen.tolist(), numbers.tolist()) == one_by_one(weights, 20000)


def test_sizes_with_surplus() -> None:
    assert blend_sizes([0.5, 0.3, 0.2], 1000) == (1000, [503, 302, 201])
    assert blend_sizes([1 / 3, 2 / 3], 100) == (101, [35, 68])


def datasets(write_corpus, tmp_path: Path, sizes: list[int]) -> list[GPTDataset]:
    options = SampleOptions(4)
    return [
        GPTDataset(
            IndexedDataset(write_corpus([[100 * i + 1] * 50], f"c{i}")),
            0,
            1,
            options,
            num_samples=size,
            seed=0,
            cache_dir=tmp_path / "cache",
        )
        for i, size in enumerate(sizes)
    ]


def test_samples_come_from_the_corpora_in_that_order(write_corpus, tmp_path: Path) -> None:
    weights = [0.5, 0.3, 0.2]
    total, sizes = blend_sizes(weights, 120)
    blend = BlendedDataset(datasets(write_corpus, tmp_path, sizes), weights, total, tmp_path / "cache")
    assert len(blend) == total == 120
    samples = [blend[i] for i in range(12)]
    assert [int(s["tokens"][0]) // 100 for s in samples] == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1]
    assert [int(s["sample_ids"]) for s in samples] == list(range(12))
    assert blend[PADDING]["loss_mask"].sum() == 0 and blend[PADDING]["sample_ids"] == -1
    assert "50.00%, 30.00%, 20.00%" in blend.describe()
    again = BlendedDataset(datasets(write_corpus, tmp_path, sizes), weights, total, tmp_path / "cache")
    assert again.fingerprint == blend.fingerprint
    other = BlendedDataset(datasets(write_corpus, tmp_path, sizes), [0.5, 0.25, 0.25], total, tmp_path)
    assert other.fingerprint != blend.fingerprint


def test_more_than_was_prepared_is_refused(write_corpus, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="takes 90 samples, but only 12 were prepared"):
        BlendedDataset(datasets(write_corpus, tmp_path, [90, 10]), [0.1, 0.9], 100, tmp_path / "cache")
