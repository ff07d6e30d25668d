"""Blends use Megatron's greedy order."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.data.blended import (
    BlendedDataset,
    blend_sizes,
    blending_indices,
    exhaustive_indices,
    normalize,
    weighted_order,
)
from ppfleetx.data.gpt_dataset import PADDING, GPTDataset, SampleOptions
from ppfleetx.data.index_map import plan_epochs
from ppfleetx.data.indexed_dataset import IndexedDataset


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
    order = weighted_order(weights, total, tmp_path / "cache")
    blend = BlendedDataset(datasets(write_corpus, tmp_path, sizes), order)
    assert len(blend) == total == 120
    samples = [blend[i] for i in range(12)]
    assert [int(s["tokens"][0]) // 100 for s in samples] == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1]
    assert [int(s["sample_ids"]) for s in samples] == list(range(12))
    assert blend[PADDING]["loss_mask"].sum() == 0 and blend[PADDING]["sample_ids"] == -1
    assert "50.00%, 30.00%, 20.00%" in blend.describe()
    again = weighted_order(weights, total, tmp_path / "cache")
    assert BlendedDataset(datasets(write_corpus, tmp_path, sizes), again).fingerprint == blend.fingerprint
    other = weighted_order([0.5, 0.25, 0.25], total, tmp_path / "cache")
    assert BlendedDataset(datasets(write_corpus, tmp_path, sizes), other).fingerprint != blend.fingerprint


GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "blending.json").read_text())


def shown(values: np.ndarray, golden: list[int] | str) -> list[int] | str:
    return values.tolist() if isinstance(golden, list) else hashlib.md5(values.tobytes()).hexdigest()


@pytest.mark.parametrize("kind", ["weighted", "exhaustive"])
def test_the_orders_are_megatrons(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/goldens/make_blending_goldens.py`"""
    monkeypatch.setattr("ppfleetx.data.blended._BLOCK_STEPS", 64)
    assert len(GOLDENS[kind]) > 20
    for golden in GOLDENS[kind]:
        if kind == "weighted":
            found = blending_indices(normalize(golden["weights"]), golden["size"])
        else:
            found = exhaustive_indices(golden["sizes"])
            counts = np.bincount(found[0], minlength=len(golden["sizes"]))
            assert counts.tolist() == golden["sizes"]
        for values, name in zip(found, ("index", "sample_index"), strict=True):
            assert shown(values, golden[name]) == golden[name]


def test_a_part_of_an_exhaustive_blend_is_its_beginning() -> None:
    """And where Megatron's blend of that size without weights is possible, it is the same."""
    sizes = [130, 7, 1, 55]
    whole = exhaustive_indices(sizes)
    for size in (0, 1, 12, 100, 192, 193):
        part = exhaustive_indices(sizes, size)
        assert all(np.array_equal(p, w[:size]) for p, w in zip(part, whole, strict=True))
        by_weight = blending_indices(normalize(sizes), size)[0]
        if (np.bincount(by_weight, minlength=4) <= sizes).all():
            assert np.array_equal(part[0], by_weight)


# Length, tokens of each corpus, weights, samples asked for: the order takes more of a corpus than Megatron-LM
# prepares (its share and half a percent, in whole epochs), and Megatron-LM refuses the blend.
SHORT = [
    (21, [61, 90, 330, 703, 349, 665], [0.96, 4e-05, 0.00066, 0.0008, 0.0135, 0.0249], 93),
    (2, [17, 38, 71, 3, 14, 8, 25, 16], [0.0028, 4e-06, 0.0007, 0.514, 5e-05, 0.009, 0.085, 0.388], 223),
]


def random_blend(draw: np.random.Generator) -> tuple[int, list[int], list[float], int]:
    num_corpora, length = int(draw.integers(2, 9)), int(draw.integers(2, 33))
    weights = (draw.dirichlet(np.ones(num_corpora)) ** draw.choice([0.5, 1, 3])).tolist()
    tokens = draw.integers(length + 1, 40 * length, num_corpora).tolist()
    return length, tokens, weights, int(draw.integers(1, 400))


def test_every_blend_has_enough_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppfleetx.data.blended._BLOCK_STEPS", 64)
    draw = np.random.default_rng(1)
    refused_by_megatron = 0
    for length, tokens, weights, num_samples in [*SHORT, *(random_blend(draw) for _ in range(200))]:
        shares = normalize(weights)
        total, sizes = blend_sizes(shares, num_samples)
        counts = np.bincount(blending_indices(shares, total)[0], minlength=len(sizes)).tolist()
        for num_tokens, size, count in zip(tokens, sizes, counts, strict=True):
            megatrons = plan_epochs(num_tokens, length, size)
            plan = plan_epochs(num_tokens, length, size, at_least=count)
            assert plan.num_samples >= count
            refused_by_megatron += megatrons.num_samples < count
            assert plan == megatrons or megatrons.num_samples < count, "what suffices stays as it is"
    assert refused_by_megatron >= len(SHORT)


def test_samples_say_their_corpus_when_asked(write_corpus, tmp_path: Path) -> None:
    total, sizes = blend_sizes([0.5, 0.3, 0.2], 12)
    order = weighted_order([0.5, 0.3, 0.2], total, tmp_path / "cache")
    blend = BlendedDataset(datasets(write_corpus, tmp_path, [size + 2 for size in sizes]), order)
    assert "source_ids" not in blend[0]
    fingerprint, blend.tells_sources = blend.fingerprint, True
    assert [int(blend[i]["source_ids"]) for i in range(12)] == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1]
    assert blend[PADDING].keys() == blend[0].keys()
    assert blend.sources == ["c0", "c1", "c2"] and blend.fingerprint == fingerprint
    for dataset, place in zip(blend.datasets, "xyz", strict=True):
        dataset.corpus.prefix = f"{place}/text_document"
    assert blend.sources == ["x/text_document", "y/text_document", "z/text_document"]
