"""Corpus checksums: every writer creates them, and a flipped bit is located by document."""

import json
import random
import zlib
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.commands.main import call
from ppfleetx.config.errors import DataError
from ppfleetx.data import checksums
from ppfleetx.data.checksums import checksums_path, compute_checksums, read_checksums
from ppfleetx.data.corpus_checks import all_damage, verify_corpora, verify_corpus
from ppfleetx.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from ppfleetx.data.prepare.corpus_reader import find_sources
from ppfleetx.data.prepare.preprocess import preprocess
from ppfleetx.data.tokenized_corpus import convert, merge
from tests.data.test_dataloader import make_config
from tests.helpers.texts import small_tokenizer

BLOCK = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", BLOCK)


def crcs(data: bytes) -> str:
    return "".join(f"{zlib.crc32(data[i : i + BLOCK]):08x}" for i in range(0, len(data), BLOCK))


def test_the_file_can_be_checked_by_anybody(toy_prefix: str) -> None:
    content = json.loads(checksums_path(toy_prefix).read_text())
    for suffix in (".bin", ".idx"):
        data = Path(f"{toy_prefix}{suffix}").read_bytes()
        assert content["files"][suffix] == {"bytes": len(data), "crc32": crcs(data)}
    assert (content["algorithm"], content["block_bytes"]) == ("crc32", BLOCK)


def test_every_writer_writes_them(tmp_path: Path, toy_prefix: str, write_corpus) -> None:
    merge([toy_prefix, write_corpus([[1, 2]], "other")], tmp_path / "merged")
    np.save(tmp_path / "f_ids.npy", np.arange(5, dtype=np.int32))
    np.savez(tmp_path / "f_idx.npz", lens=np.array([2, 3], np.int32), docs=np.array([0, 1, 2]))
    convert(tmp_path / "f", tmp_path / "converted")
    (tmp_path / "a.txt").write_text("a text")
    preprocess(find_sources([tmp_path / "a.txt"]), tmp_path / "p", small_tokenizer(), show_progress=False)
    IndexedDatasetWriter(tmp_path / "empty", "u2").finalize()
    for name in ("merged", "converted", "p_text_document", "empty"):
        prefix = tmp_path / name
        assert read_checksums(prefix) == compute_checksums(prefix)
        assert all_damage(str(prefix)) == ([], True)


def test_every_flipped_bit_is_found_with_its_documents(toy_prefix: str) -> None:
    rng = random.Random(3)
    corpus = IndexedDataset(toy_prefix)
    document_of_byte = np.repeat(np.arange(len(corpus)), corpus.sizes * 2)
    for number in range(60):
        path = Path(f"{toy_prefix}{rng.choice(['.bin', '.bin', '.idx'])}")
        sound = path.read_bytes()
        position, flip = rng.randrange(len(sound)), 1 << rng.randrange(8)
        path.write_bytes(sound[:position] + bytes([sound[position] ^ flip]) + sound[position + 1 :])
        (damage,), _ = all_damage(toy_prefix)
        first = position // BLOCK * BLOCK
        end = min(first + BLOCK, len(sound))
        span = f"{path}: block {position // BLOCK}, bytes [{first:,}, {end:,})"
        assert damage.startswith(span), (number, damage)
        if path.suffix == ".bin":
            inside = document_of_byte[first:end]
            assert damage.endswith(f"documents {inside[0]} to {inside[-1]}, counted from 0")
            assert verify_corpus(toy_prefix, "index"), "the tokens are not looked at"
        for level in ("index", "full")[path.suffix == ".bin" :]:
            with pytest.raises(DataError, match="is not as it was written"):
                verify_corpus(toy_prefix, level)
        path.write_bytes(sound)
    assert all_damage(toy_prefix) == ([], True) and verify_corpus(toy_prefix, "full")


def test_checksums_can_be_damaged_themselves(toy_prefix: str) -> None:
    """No flip in them is taken for damage of the corpus, and none hides any."""
    path = checksums_path(toy_prefix)
    sound, expected = path.read_bytes(), read_checksums(toy_prefix)
    rng = random.Random(5)
    for position in rng.sample(range(len(sound)), 200):
        flip = 1 << rng.randrange(8)
        path.write_bytes(sound[:position] + bytes([sound[position] ^ flip]) + sound[position + 1 :])
        try:
            assert read_checksums(toy_prefix) == expected  # white space
        except DataError as error:
            assert "itself is damaged" in str(error)
    for content in (b"", b"[]", b"[" * 2000, b"{}", b"\xff", sound[:-40], b" " * 10_000_000):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"itself is damaged|too large for such a file"):
            read_checksums(toy_prefix)


def test_a_merge_compares_its_sources(toy_prefix: str, write_corpus, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        path = Path(f"{toy_prefix}{suffix}")
        sound = path.read_bytes()
        # In the index: a document boundary that is moved, which no other check can see.
        place = len(sound) // 2 if suffix == ".bin" else len(sound) - 24
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        with pytest.raises(DataError, match=rf"toy\{suffix}: block \d+"):
            merge([write_corpus([[1]], "one"), toy_prefix], tmp_path / "merged")
        assert not list(tmp_path.glob("merged*"))
        path.write_bytes(sound)
    checksums_path(toy_prefix).unlink()
    merge([toy_prefix], tmp_path / "merged")
    assert read_checksums(tmp_path / "merged") == compute_checksums(tmp_path / "merged")
    with pytest.raises(DataError, match="exists already; --overwrite replaces it"):
        merge([toy_prefix], tmp_path / "merged")
    merge([toy_prefix], tmp_path / "merged", overwrite=True)


def test_a_run_says_once_what_it_compared(tmp_path, toy_prefix, write_corpus, caplog) -> None:
    def said(*overrides: str, prefixes=toy_prefix) -> str:
        caplog.clear()
        with caplog.at_level("INFO", "ppfleetx"):
            verify_corpora(make_config(tmp_path, prefixes, *overrides), ("Train", "Eval"))
        (record,) = caplog.records
        return record.getMessage()

    assert said() == "checksums of the data: the index of 1 corpus compared"
    full = "Data.Eval.dataset.verify=full"
    assert said(full) == "checksums of the data: all of 1 corpus compared"
    other = write_corpus([[1]], "other")
    checksums_path(other).unlink()
    assert said(prefixes=[toy_prefix, other]) == (
        f"checksums of the data: the index of 1 corpus compared; missing for 1 corpus ({other}): "
        "ppfleetx inspect-data PREFIX --write-checksums makes them"
    )
    with pytest.raises(DataError, match=r"verify is full, but there is no .*other\.checksums\.json"):
        said(full, prefixes=[toy_prefix, other])
    with Path(f"{toy_prefix}.bin").open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    with pytest.raises(DataError, match=r"toy\.bin: block 78, bytes \[4,992, 5,056\).*: documents 50 to 51"):
        said(full)
    off = ("Data.Train.dataset.verify=none", "Data.Eval.dataset.verify=none")
    assert said(*off) == "checksums of the data: nothing of 1 corpus compared"


def inspect(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = call("inspect-data", arguments)
    return code, capsys.readouterr().out


def test_the_tool(toy_prefix: str, capsys) -> None:
    code, said = inspect(capsys, toy_prefix)
    assert code == 0 and "137 documents, 137 sequences, 6,903 tokens (uint16)" in said and "50,256" in said
    facts = json.loads(inspect(capsys, toy_prefix, "--json")[1])
    assert (facts["tokens"], facts["has_checksums"], facts["largest_id"]) == (6903, True, 50256)
    assert inspect(capsys, toy_prefix, "--verify") == (
        0, f"sound: {toy_prefix}, all checksums right\n"
    )  # fmt: skip
    with pytest.raises(DataError, match="exists already"):
        inspect(capsys, toy_prefix, "--write-checksums")
    checksums_path(toy_prefix).unlink()
    assert "it has no checksums" in inspect(capsys, toy_prefix, "--verify")[1]
    inspect(capsys, toy_prefix, "--write-checksums")
    Path(f"{toy_prefix}.bin").write_bytes(bytes(13806))
    code, said = inspect(capsys, toy_prefix, "--verify")
    assert code == 1 and said.count("damaged: ") == len(range(0, 13806, BLOCK))
    Path(f"{toy_prefix}.idx").unlink()
    assert inspect(capsys, toy_prefix, "--verify")[0] == 1
    with pytest.raises(DataError, match="no corpus at nowhere"):
        inspect(capsys, "nowhere", "--verify")
