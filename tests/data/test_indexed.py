"""The .bin/.idx pair: byte-exact writing, reading back, and every kind of damage named."""

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.config.errors import DataError
from ppfleetx.data.indexed_dataset import DTYPES, IndexedDataset, IndexedDatasetWriter, optimal_dtype
from ppfleetx.data.tokenized_corpus import merge
from tests.data.conftest import sequences

# Made with Megatron-LM d98e8a64, IndexedDatasetBuilder, from the documents of `toy_documents`.
TOY_IDX_MD5 = "e738bcedcc7926ff9b6e8bb68cfae48d"


def contents(prefix: str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def test_toy_files_equal_megatrons(toy_prefix: str, toy_documents: list[list[int]]) -> None:
    tokens, index = contents(toy_prefix)
    assert hashlib.md5(index).hexdigest() == TOY_IDX_MD5
    assert index[:34].hex() == "4d4d4944494458000001000000000000000889000000000000008a00000000000000"
    assert tokens == np.concatenate([np.array(d, "<u2") for d in toy_documents]).tobytes()


def test_all_ways_of_writing_give_the_same_bytes(
    toy_prefix: str, toy_documents: list[list[int]], tmp_path: Path
) -> None:
    flat = np.concatenate(toy_documents)
    lengths = np.array([len(d) for d in toy_documents])
    with IndexedDatasetWriter(tmp_path / "batch", "u2") as writer:
        writer.add_documents(flat[: lengths[:50].sum()], lengths[:50])
        writer.add_documents(flat[lengths[:50].sum() :], lengths[50:])
    with IndexedDatasetWriter(tmp_path / "single", "u2") as writer:
        for document in toy_documents:
            writer.add_document(document, [len(document)])
    assert contents(tmp_path / "batch") == contents(tmp_path / "single") == contents(toy_prefix)


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_reads_back_what_was_written(code: int, tmp_path: Path) -> None:
    dtype = DTYPES[code]
    with IndexedDatasetWriter(tmp_path / "x", dtype) as writer:
        writer.add_document([1, 2, 3, 4], [3, 1])
        writer.add_document([], [])
        writer.add_document([5, 6, 7, 8, 9], [2, 0, 3])
    data = IndexedDataset(tmp_path / "x")
    assert (tmp_path / "x.idx").read_bytes()[17] == code
    assert data.dtype == dtype
    assert data.sizes.tolist() == [3, 1, 2, 0, 3]
    assert data.document_indices.tolist() == [0, 2, 2, 5]
    assert sequences(data) == [[1, 2, 3], [4], [5, 6], [], [7, 8, 9]]
    assert data.get(4, 1).tolist() == [8, 9]
    assert data.get(4, 1, 1).tolist() == [8]


def test_an_empty_document_in_a_batch_is_an_empty_document(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "batch", "i4") as writer:
        writer.add_documents(np.array([7, 8, 9]), np.array([0, 2, 0, 1, 0]))
    with IndexedDatasetWriter(tmp_path / "single", "i4") as writer:
        for document in [[], [7, 8], [], [9], []]:
            writer.add_document(document, [len(document)] if document else [])
    assert contents(tmp_path / "batch") == contents(tmp_path / "single")


def test_an_empty_corpus_can_be_written_and_read(tmp_path: Path) -> None:
    IndexedDatasetWriter(tmp_path / "x", "u2").finalize()
    data = IndexedDataset(tmp_path / "x")
    assert len(data) == data.num_tokens == 0
    assert isinstance(data.fingerprint, str)


def test_merging_equals_writing_at_once(write_corpus, toy_documents, toy_prefix, tmp_path) -> None:
    parts = [write_corpus(toy_documents[a:b], f"part{a}_{b}") for a, b in [(0, 20), (20, 20), (20, 137)]]
    merge(parts, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(toy_prefix)
    with pytest.raises(DataError, match="both input and output"):
        merge(parts, parts[0])
    with pytest.raises(DataError, match="stores int32"):
        merge([*parts, write_corpus([[1]], "wide", "i4")], tmp_path / "mixed")
    with pytest.raises(DataError, match="nothing to merge"):
        merge([], tmp_path / "none")
    assert not list(tmp_path.glob("mixed*")), "a failed merge must leave nothing behind"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b, i: (b[:-2], i), "bin is truncated"),
        (lambda b, i: (b + b"\0\0", i), "bin is too long"),
        (lambda b, i: (b, i[:-1]), "idx is truncated"),
        (lambda b, i: (b, i[:20]), "idx is truncated"),
        (lambda b, i: (b, b""), "idx is truncated"),
        (lambda b, i: (b, i + b"\0"), "idx is damaged"),
        (lambda b, i: (b, i + b"\0" * 137), "multimodal"),
        (lambda b, i: (b, b"X" + i[1:]), "not an index file"),
        (lambda b, i: (b, i[:9] + struct.pack("<Q", 2) + i[17:]), "version 2"),
        (lambda b, i: (b, i[:17] + b"\x09" + i[18:]), "dtype code 9"),
        (lambda b, i: (b, i[:17] + b"\x04" + i[18:]), "does not follow"),
        (lambda b, i: (b, i[:34] + struct.pack("<i", -1) + i[38:]), "negative length"),
        (lambda b, i: (b, i[:34] + struct.pack("<i", 4) + i[38:]), "does not follow"),
        (lambda b, i: (b, i[:-8] + struct.pack("<q", 136)), "document boundaries"),
        (lambda b, i: (b, i[:-16] + struct.pack("<q", -1) + i[-8:]), "document boundaries"),
        (lambda b, i: (None, i), "partner"),
        (lambda b, i: (b, None), "partner"),
        (lambda b, i: (None, None), "no corpus at"),
    ],
)
def test_damage_is_found_when_opened(toy_prefix: str, damage, message: str) -> None:
    for path, data in zip(
        [f"{toy_prefix}.bin", f"{toy_prefix}.idx"], damage(*contents(toy_prefix)), strict=True
    ):
        Path(path).unlink()
        if data is not None:
            Path(path).write_bytes(data)
    with pytest.raises(DataError, match=message):
        IndexedDataset(toy_prefix)


def test_a_part_of_a_name_leads_to_the_whole(toy_prefix: str) -> None:
    """preprocess appends to the name that is given."""
    with pytest.raises(DataError, match=rf"no corpus at .* \(there is {toy_prefix}\)"):
        IndexedDataset(toy_prefix[:-2])


def test_nothing_is_visible_before_finalize_and_nothing_stays_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), IndexedDatasetWriter(tmp_path / "x", "u2") as writer:
        writer.add_document([1, 2], [2])
        assert not list(tmp_path.glob("*.bin")) and not list(tmp_path.glob("*.idx"))
        raise RuntimeError("stop")
    assert not list(tmp_path.iterdir())


def test_writer_refuses_what_it_cannot_store(tmp_path: Path) -> None:
    writer = IndexedDatasetWriter(tmp_path / "x", "u2")
    for tokens in ([65536], [-1], [1.5]):
        with pytest.raises(DataError):
            writer.add_document(tokens, [1])
    with pytest.raises(ValueError, match="sum to 3"):
        writer.add_document([1, 2], [3])
    with pytest.raises(ValueError, match="sum to 2"):
        writer.add_documents(np.array([1]), np.array([2]))
    writer.abort()
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="cannot be stored as complex"):
        IndexedDatasetWriter(tmp_path / "x", "c16")


def test_optimal_dtype_at_the_limit() -> None:
    assert optimal_dtype(65499) == np.uint16
    assert optimal_dtype(65500) == optimal_dtype(None) == np.int32


def test_fingerprint_tells_corpora_apart_but_not_places(write_corpus) -> None:
    documents = [[1, 2, 3], [4, 5], [6]]
    same = IndexedDataset(write_corpus(documents, "a")).fingerprint
    assert IndexedDataset(write_corpus(documents, "b")).fingerprint == same
    for other in ([[1, 2], [3, 4, 5], [6]], [[1, 2, 3], [4, 5], [7]], [[1, 2, 3], [4, 5]]):
        assert IndexedDataset(write_corpus(other, "c")).fingerprint != same
    assert IndexedDataset(write_corpus(documents, "d", "i4")).fingerprint != same
