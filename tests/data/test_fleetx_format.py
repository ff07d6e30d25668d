"""FleetX's corpora: read with the same interface, converted without loss, and found by their path."""

from pathlib import Path

import numpy as np
import pytest

from ppfleetx.config.errors import DataError
from ppfleetx.data.gpt_dataset import GPTDataset, SampleOptions
from ppfleetx.data.indexed_dataset import IndexedDataset
from ppfleetx.data.tokenized_corpus import FleetXDataset, convert, find_prefixes, open_tokens
from tests.data.conftest import sequences

IDS = np.arange(10, dtype=np.uint16)
LENS = np.array([3, 0, 2, 5], np.int32)
DOCS = np.array([0, 2, 2, 4], np.int64)


def write(directory: Path, name: str = "x", ids=IDS, lens=LENS, docs=DOCS) -> str:
    np.save(directory / f"{name}_ids.npy", ids)
    np.savez(directory / f"{name}_idx.npz", lens=lens, docs=docs)
    return str(directory / name)


def test_reads_sequences(tmp_path: Path) -> None:
    data = FleetXDataset(write(tmp_path))
    assert sequences(data) == [[0, 1, 2], [], [3, 4], [5, 6, 7, 8, 9]]
    assert data.get(3, 1, 2).tolist() == [6, 7]
    assert data.document_indices.tolist() == DOCS.tolist()
    assert (data.num_tokens, data.dtype, data.sizes.dtype) == (10, np.uint16, np.int32)
    assert FleetXDataset(tmp_path / "x_ids.npy").fingerprint == data.fingerprint


def test_reads_the_legacy_archive(tmp_path: Path) -> None:
    np.savez(tmp_path / "old_ids.npz", ids=IDS, lens=LENS)
    data = FleetXDataset(tmp_path / "old")
    assert sequences(data) == [[0, 1, 2], [], [3, 4], [5, 6, 7, 8, 9]]
    assert data.document_indices.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_conversion_keeps_everything(tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppfleetx.data.tokenized_corpus._BATCH", batch)
    source = FleetXDataset(write(tmp_path))
    convert(tmp_path / "x", tmp_path / "y")
    data = IndexedDataset(tmp_path / "y")
    assert data.sizes.tolist() == source.sizes.tolist()
    assert data.document_indices.tolist() == source.document_indices.tolist()
    assert data.flat(0, 10).tolist() == IDS.tolist()
    assert data.fingerprint == source.fingerprint


def test_both_formats_give_the_same_samples(toy_documents, toy_prefix: str, tmp_path: Path) -> None:
    lens = np.array([len(d) for d in toy_documents], np.int32)
    ids = np.concatenate(toy_documents).astype(np.uint16)
    prefix = write(tmp_path, "fleetx", ids, lens, np.arange(138))
    left, right = (
        GPTDataset(open_tokens(p), 0, 137, SampleOptions(32), num_samples=99, seed=3)
        for p in (prefix, toy_prefix)
    )
    assert left.fingerprint == right.fingerprint
    assert all(np.array_equal(left[i]["tokens"], right[i]["tokens"]) for i in range(99))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": IDS[:-1]}, "lens add up to 10, ids has 9"),
        ({"ids": IDS.astype(float)}, "flat array of integers"),
        ({"docs": np.array([0, 3])}, "docs must run from 0"),
        (
            {"docs": np.array([0, 3, 1, 4])},
            r"x_idx\.npz is damaged: docs must run from 0 to 4 sequences",
        ),
        ({"docs": np.array([[0, 4]])}, "flat array of integers"),
        ({"lens": np.array([[3, 0], [2, 5]])}, "flat array of integers"),
    ],
)
def test_damage_is_named(tmp_path: Path, changes, message: str) -> None:
    prefix = write(tmp_path, **changes)
    with pytest.raises(DataError, match=message):
        FleetXDataset(prefix)


def test_missing_and_truncated_files(tmp_path: Path) -> None:
    prefix = write(tmp_path)
    for name in ("x_ids.npy", "x_idx.npz"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-7])
        with pytest.raises(DataError, match=f"{name} is damaged"):
            FleetXDataset(prefix)
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "x_idx.npz").unlink()
    with pytest.raises(DataError, match=r"x_idx\.npz does not exist"):
        open_tokens(prefix)


def test_pickled_arrays_are_not_opened(tmp_path: Path) -> None:
    np.save(tmp_path / "x_ids.npy", np.array([print], object), allow_pickle=True)
    np.savez(tmp_path / "x_idx.npz", lens=LENS)
    with pytest.raises(DataError, match=r"x_ids\.npy is damaged"):
        FleetXDataset(tmp_path / "x")


def test_paths_find_their_corpora(write_corpus, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    write(tmp_path / "d", "b")
    write_corpus([[1]], "d/c")
    write_corpus([[1]], "d/a")
    (tmp_path / "d" / "notes.txt").write_text("no corpus")
    prefixes = [str(tmp_path / "d" / name) for name in "abc"]
    assert find_prefixes(tmp_path / "d") == prefixes
    assert find_prefixes(f"{prefixes[0]}.bin") == find_prefixes(f"{prefixes[0]}.idx") == prefixes[:1]
    assert find_prefixes(f"{prefixes[1]}_ids.npy") == prefixes[1:2]
    assert [type(open_tokens(p)) for p in prefixes] == [IndexedDataset, FleetXDataset, IndexedDataset]
    with pytest.raises(DataError, match="no corpus at"):
        open_tokens(tmp_path / "nothing")
    (tmp_path / "e").mkdir()
    with pytest.raises(DataError, match="no corpus in"):
        find_prefixes(tmp_path / "e")


def test_a_conversion_that_fails_blames_the_input_and_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path, docs=np.array([0, 3, 1, 4]))
    with pytest.raises(DataError, match=r"x_idx\.npz is damaged: docs must run"):
        convert(tmp_path / "x", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    prefix = write(tmp_path)
    convert(prefix, tmp_path / "out")
    before = (tmp_path / "out.idx").stat().st_mtime_ns
    with pytest.raises(DataError, match=r"out\.idx exists already; --overwrite replaces it"):
        convert(prefix, tmp_path / "out")
    assert (tmp_path / "out.idx").stat().st_mtime_ns == before
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        convert(prefix, tmp_path / "file" / "out")
