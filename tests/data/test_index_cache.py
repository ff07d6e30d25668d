"""The index cache: reused, keyed by everything that affects it, rebuilt when damaged, and optional."""

import threading
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.data import gpt_dataset
from ppfleetx.data.gpt_dataset import GPTDataset, SampleOptions
from ppfleetx.data.index_map import load_or_build
from ppfleetx.data.indexed_dataset import IndexedDataset

ARRAYS = {"a": np.arange(1000), "b": np.arange(6, dtype=np.int32).reshape(3, 2)}


class Builder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return dict(ARRAYS)


def load(directory: Path, build) -> dict[str, np.ndarray]:
    arrays = load_or_build(directory, "key", ("a", "b"), build, {"what": "a test"}, num_bytes=0)
    assert all(np.array_equal(arrays[name], ARRAYS[name]) for name in ARRAYS)
    assert {name: array.dtype for name, array in arrays.items()} == {n: a.dtype for n, a in ARRAYS.items()}
    return arrays


def test_built_once_then_found(tmp_path: Path) -> None:
    build = Builder()
    for _ in range(3):
        load(tmp_path / "cache", build)
    assert build.calls == 1
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
    build = Builder()
    load(tmp_path, build)
    damage(tmp_path / name)
    with caplog.at_level("WARNING", "ppfleetx"):
        load(tmp_path, build)
    if (damage, name) not in {(flip, "key.json")}:  # a flipped bit may fall into the part for people
        assert build.calls == 2
        assert ("damaged" in caplog.text) == ((damage, name) != (Path.unlink, "key.json"))
    load(tmp_path, build)
    assert build.calls <= 2, "repaired for good"


def test_a_place_that_cannot_be_written_costs_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level("WARNING", "ppfleetx"):
        load(tmp_path / "file" / "cache", Builder())
    assert "cannot be kept" in caplog.text and "cache_dir" in caplog.text


def test_builders_at_the_same_time_do_no_harm(tmp_path: Path) -> None:
    barrier, whole = threading.Barrier(8), []

    def work() -> None:
        def build() -> dict[str, np.ndarray]:
            barrier.wait(10)
            return dict(ARRAYS)

        load(tmp_path, build)
        whole.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(whole) == 8
    load(tmp_path, Builder())
    assert not list(tmp_path.glob(".*"))


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    original = gpt_dataset.build_index_maps
    monkeypatch.setattr(gpt_dataset, "build_index_maps", lambda *a: calls.append(1) or original(*a))
    return calls


def test_the_key_holds_all_that_decides_the_maps(
    write_corpus,
    toy_documents: list[list[int]],
    toy_prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = count_builds(monkeypatch)

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
