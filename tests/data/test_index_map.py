"""Index maps match Megatron's arrays, and a slow reference on random corpora. Their cache is reused, keyed by
everything that affects it, rebuilt when damaged, and optional."""

import hashlib
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from ppfleetx.data import gpt_dataset
from ppfleetx.data.gpt_dataset import GPTDataset, SampleOptions, split_ranges
from ppfleetx.data.index_map import (
    IndexMaps,
    build_index_maps,
    load_or_build,
    maps_bytes,
    order_fingerprint,
    plan_epochs,
)
from ppfleetx.data.indexed_dataset import IndexedDataset

# md5[:12] of the bytes of document, sample and shuffle index, from Megatron-LM d98e8a64 on the toy corpus:
# (seed, sequence length, split, samples, mode), (tokens per epoch, epochs, samples in them), three hashes.
GOLDENS = [
    ((1234, 32, "90,8,2", 100, 0), (6259, 1, 195), "a7e8afbca6be 32bb3724c630 8ee4ffd1ca89"),
    ((1234, 64, "100,0,0", 300, 0), (6903, 3, 323), "c2f82068c5b0 d1db463d52be 061e85a44df5"),
]


@pytest.mark.parametrize(("arguments", "numbers", "hashes"), GOLDENS)
def test_maps_equal_megatrons(toy_prefix: str, arguments, numbers, hashes: str) -> None:
    seed, length, split, num_samples, mode = arguments
    sizes = IndexedDataset(toy_prefix).sizes
    first, last = split_ranges(len(sizes), split)[mode]
    plan = plan_epochs(int(sizes[first:last].sum()), length, num_samples)
    assert (plan.tokens_per_epoch, plan.num_epochs, plan.num_samples) == numbers
    maps = build_index_maps(sizes, first, last, plan, seed)
    assert maps_bytes(last - first, plan) == sum(array.nbytes for array in vars(maps).values())
    arrays = (maps.document_index, maps.sample_index, maps.shuffle_index)
    assert [a.dtype for a in arrays] == [np.int32, np.int32, np.uint32]
    assert [hashlib.md5(a.tobytes()).hexdigest()[:12] for a in arrays] == hashes.split()


# Toy corpus, L = 32, all of it: which sample counts share one order was observed in the same Megatron-LM.
def test_the_order_changes_exactly_where_megatrons_does(toy_prefix: str) -> None:
    data = IndexedDataset(toy_prefix)
    plans = {n: plan_epochs(data.num_tokens, 32, n) for n in (50, 215, 216, 300, 420)}
    assert plans[50] == plans[215] != plans[216]
    assert plans[300] != plans[420]
    assert plans[300].num_samples == plans[420].num_samples == 431
    prints = {n: order_fingerprint(data.fingerprint, 0, 137, plan, 1) for n, plan in plans.items()}
    assert prints[50] == prints[215]
    assert len(set(prints.values())) == len(set(plans.values()))
    assert order_fingerprint(data.fingerprint, 0, 137, plans[50], 2) != prints[50]
    assert order_fingerprint(data.fingerprint, 0, 136, plans[50], 1) != prints[50]


def walk(
    sizes: list[int], first: int, last: int, length: int, num_samples: int | None, seed: int
) -> IndexMaps:
    """The maps as Megatron's documentation tells them: repeat, shuffle, then count every token one by one."""
    per_epoch = sum(sizes[first:last])
    epochs, separate = 1, False
    while num_samples is not None and epochs * per_epoch < num_samples * length + 1:
        epochs += 1
    before = ((epochs - 1) * per_epoch - 1) // length
    if epochs > 1:
        separate = num_samples - before < int(0.80 * ((per_epoch - 1) // length))
    random = np.random.RandomState(seed)
    documents: list[int] = []
    for repeats in [epochs - 1, 1] if separate else [epochs]:
        block = np.array(list(range(first, last)) * repeats, np.int32)
        random.shuffle(block)
        documents += block.tolist()
    rows, position, offset = [(0, 0)], 0, 0
    for _ in range((epochs * per_epoch - 1) // length):
        steps = length
        while steps:  # go on by one token, over the border of a sequence when there is none left
            while offset >= sizes[documents[position]]:
                position, offset = position + 1, 0
            offset, steps = offset + 1, steps - 1
        while offset >= sizes[documents[position]]:
            position, offset = position + 1, 0
        rows.append((position, offset))
    total = len(rows) - 1
    blocks = [np.arange(before), np.arange(before, total)] if separate else [np.arange(total)]
    for block in blocks:
        random.shuffle(block)
    return IndexMaps(
        np.array(documents, np.int32), np.array(rows, np.int32), np.concatenate(blocks).astype(np.uint32)
    )


def assert_equal_maps(left: IndexMaps, right: IndexMaps) -> None:
    for name in ("document_index", "sample_index", "shuffle_index"):
        a, b = getattr(left, name), getattr(right, name)
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert np.array_equal(a, b), name


@pytest.mark.parametrize("case", range(200))
def test_maps_equal_the_slow_walk(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(case)
    # Small chunks, so that borders of chunks fall everywhere, also beside empty sequences.
    monkeypatch.setattr("ppfleetx.data.index_map._CHUNK", int(draw.integers(1, 12)))
    longest = int(draw.choice([1, 3, 40]))
    sizes = draw.integers(0, longest + 1, size=draw.integers(1, 60)).astype(np.int32)
    first, last = sorted(draw.integers(0, len(sizes) + 1, size=2).tolist())
    if sizes[first:last].sum() == 0:
        first, last, sizes[0] = 0, len(sizes), 1
    tokens = int(sizes[first:last].sum())
    length = int(draw.integers(1, 3 * longest + 2))
    num_samples = None if draw.random() < 0.1 else int(draw.integers(0, 4 * tokens // length + 3))
    seed = int(draw.integers(0, 2**32))
    maps = build_index_maps(sizes, first, last, plan_epochs(tokens, length, num_samples), seed)
    assert_equal_maps(maps, walk(sizes.tolist(), first, last, length, num_samples, seed))
    assert len(maps.shuffle_index) >= (num_samples or 0)


def test_token_counts_beyond_single_precision() -> None:
    """2^24 is where 32-bit floats stop counting; one token decides about the last sample here."""
    for tokens in (2**24 + 1, 2**33 + 1):
        assert plan_epochs(tokens, 1024, None).num_samples == tokens // 1024
        assert plan_epochs(tokens - 1, 1024, None).num_samples == tokens // 1024 - 1
        assert plan_epochs(tokens, 1024, tokens // 1024).num_epochs == 1
        assert plan_epochs(tokens - 1, 1024, tokens // 1024).num_epochs == 2


def test_offsets_far_into_the_stream_stay_exact() -> None:
    sizes = np.full(3, 2**31 - 1, np.int32)
    plan = plan_epochs(3 * (2**31 - 1), 2**20 + 3, None)
    maps = build_index_maps(sizes, 0, 3, plan, 0)
    positions = maps.sample_index.astype(np.int64) @ np.array([2**31 - 1, 1])
    assert np.array_equal(positions, np.arange(plan.num_samples + 1) * (2**20 + 3))


@pytest.mark.parametrize(
    ("split", "ranges"),
    [
        ("969, 30, 1", [(0, 133), (133, 137), (137, 137)]),
        ("949,50,1", [(0, 130), (130, 137), (137, 137)]),
        ("90,8,2", [(0, 123), (123, 134), (134, 137)]),
        ([1, 1], [(0, 68), (68, 137), (137, 137)]),  # 68.5 rounds to even
        ("100", [(0, 137), (137, 137), (137, 137)]),
        ("0,1,0", [(0, 0), (0, 137), (137, 137)]),
        ([0.98, 0.02, 0.0], [(0, 134), (134, 137), (137, 137)]),
    ],
)
def test_split_ranges(split, ranges) -> None:
    assert split_ranges(137, split) == ranges


ARRAYS = {"a": np.arange(1000), "b": np.arange(6, dtype=np.int32).reshape(3, 2)}


def load(directory: Path, build) -> None:
    arrays = load_or_build(directory, "key", ("a", "b"), build, num_bytes=0)
    assert all(np.array_equal(arrays[name], ARRAYS[name]) for name in ARRAYS)
    assert {name: array.dtype for name, array in arrays.items()} == {n: a.dtype for n, a in ARRAYS.items()}


def test_built_once_then_found(tmp_path: Path) -> None:
    build = Mock(return_value=ARRAYS)
    for _ in range(3):
        load(tmp_path / "cache", build)
    assert build.call_count == 1
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == ["key-a.npy", "key-b.npy", "key.json"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, flip, empty, Path.unlink])
@pytest.mark.parametrize("name", ["key-a.npy", "key-b.npy", "key.json"])
def test_damage_is_repaired(tmp_path: Path, damage, name: str, caplog: pytest.LogCaptureFixture) -> None:
    build = Mock(return_value=ARRAYS)
    load(tmp_path, build)
    damage(tmp_path / name)
    with caplog.at_level("WARNING", "ppfleetx"):
        load(tmp_path, build)
    assert ("damaged" in caplog.text) == ((damage, name) != (Path.unlink, "key.json"))
    load(tmp_path, build)
    assert build.call_count == 2, "repaired for good"


def test_a_place_that_cannot_be_written_costs_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level("WARNING", "ppfleetx"):
        load(tmp_path / "file" / "cache", lambda: ARRAYS)
    assert "cannot be kept" in caplog.text and "cache_dir" in caplog.text


def test_builders_at_the_same_time_do_no_harm(tmp_path: Path) -> None:
    barrier, whole = threading.Barrier(8), []

    def work() -> None:
        def build() -> dict[str, np.ndarray]:
            barrier.wait(10)
            return ARRAYS

        load(tmp_path, build)
        whole.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(whole) == 8
    load(tmp_path, lambda: ARRAYS)
    assert not list(tmp_path.glob(".*"))


def test_the_key_holds_all_that_decides_the_maps(
    write_corpus,
    toy_documents: list[list[int]],
    toy_prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    build = gpt_dataset.build_index_maps
    monkeypatch.setattr(gpt_dataset, "build_index_maps", lambda *a: calls.append(1) or build(*a))

    def dataset(prefix=toy_prefix, first=0, last=100, length=32, num_samples=50, seed=1) -> GPTDataset:
        corpus, options = IndexedDataset(prefix), SampleOptions(length)
        return GPTDataset(
            corpus, first, last, options, num_samples=num_samples, seed=seed, cache_dir=tmp_path / "maps"
        )

    original = dataset()
    changed = [
        dataset(seed=2),
        dataset(last=101),
        dataset(first=1),
        dataset(length=31),
        dataset(num_samples=500),
        dataset(write_corpus([[*d[:-1], 1] for d in toy_documents], "other")),
        dataset(write_corpus([d[:-1] for d in toy_documents], "shorter")),
    ]
    assert len(calls) == 1 + len(changed)
    assert len({d.fingerprint for d in [original, *changed]}) == 1 + len(changed)
    # Nothing else decides them: a moved corpus and a sample count of the same epochs find the same maps.
    moved = dataset(write_corpus(toy_documents, "moved"))
    more = dataset(num_samples=60)
    assert len(calls) == 1 + len(changed)
    assert moved.fingerprint == more.fingerprint == original.fingerprint
