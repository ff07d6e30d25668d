"""Command lines around corpora: merge, convert, build the index ahead."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from ppfleetx.commands.main import call
from ppfleetx.config.errors import ConfigError, DataError, UserError
from ppfleetx.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from ppfleetx.data.prepare.stdlib_corpus import stdlib_files, write_stdlib_corpus
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from tests.goldens.chat_styles import TOKENIZERS


def run(verb: str, *arguments: object) -> None:
    assert not call(verb, list(map(str, arguments)))


def test_merge(toy_prefix: str, write_corpus, toy_documents, tmp_path: Path, capsys) -> None:
    (tmp_path / "parts").mkdir()
    write_corpus(toy_documents[:50], "parts/a")
    write_corpus(toy_documents[50:], "parts/b")
    run("merge-data", "--input", tmp_path / "parts", "--output-prefix", tmp_path / "all")
    assert "2 corpora, 137 documents, 6,903 tokens" in capsys.readouterr().out
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"all.{suffix}").read_bytes() == Path(f"{toy_prefix}.{suffix}").read_bytes()


def test_corpora_of_two_types_are_not_merged(tmp_path: Path, write_corpus) -> None:
    prefixes = [write_corpus([[1, 2]], name) for name in ("a", "b")]
    with IndexedDatasetWriter(prefixes[1], np.int32) as writer:
        writer.add_document(np.arange(2), [2])
    with pytest.raises(DataError, match=r"b stores int32, .*a stores uint16\. A run can read both"):
        run("merge-data", "--input", *prefixes, "--output-prefix", tmp_path / "all")


def test_megatrons_options_of_preprocessing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat")
    given = ["prepare", "--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "out"]
    more = ["--dataset-impl", "mmap", "--log-interval", 100, "--workers", 1, "--tokenizer-type"]
    run(*given, "--tokenizer-model", TOKENIZERS / "gpt2", *more, "HuggingFaceTokenizer")
    assert IndexedDataset(tmp_path / "out_text_document").num_tokens
    with pytest.raises(ConfigError, match="begin each document with this tokenizer's BOS"):
        run(*given, "--overwrite", "--tokenizer", TOKENIZERS / "llama3", *more, "HuggingFaceTokenizer")


def test_convert(tmp_path: Path) -> None:
    np.save(tmp_path / "x_ids.npy", np.arange(5, dtype=np.int32))
    np.savez(tmp_path / "x_idx.npz", lens=np.array([2, 3], np.int32), docs=np.array([0, 1, 2]))
    run("convert-data", "--input", tmp_path / "x", "--output-prefix", tmp_path / "y")
    assert IndexedDataset(tmp_path / "y").get(1).tolist() == [2, 3, 4]


def test_the_index_is_built_ahead(toy_prefix: str, tmp_path: Path, capsys) -> None:
    dataset = {
        "input_dir": toy_prefix,
        "split": [80, 20, 0],
        "max_seq_len": 32,
        "cache_dir": str(tmp_path / "maps"),
    }
    tree = {
        "Global": {"global_batch_size": 4, "micro_batch_size": 4},
        "Engine": {"max_steps": 5, "eval_iters": 2},
        "Model": {"vocab_size": 50304, "hidden_size": 64, "num_layers": 1, "num_attention_heads": 4},
        "Data": {"Train": {"dataset": dataset}, "Eval": {"dataset": dataset}, "Test": None},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    hashes = []
    for _ in range(2):
        run("index", "-c", tmp_path / "c.yaml")
        said = capsys.readouterr().out
        hashes.append(re.findall(r"(Train|Eval): \d+ samples prepared, order ([0-9a-f]{32})", said))
    assert hashes[0] == hashes[1] and len(dict(hashes[0])) == 2
    assert "Test: not configured" in said
    assert len(list((tmp_path / "maps").glob("*.npy"))) == 6


def test_the_files_are_the_librarys_own():
    files = stdlib_files()
    parts = {part for path in files for part in path.parts}
    assert {"argparse.py", "json", "asyncio"} <= parts
    assert not {"site-packages", "test", "tests", "numpy"} & parts
    assert files == stdlib_files() and len(files) > 400


def test_the_corpus_is_shuffled_and_the_same_each_time(tmp_path):
    num_documents, num_bytes = write_stdlib_corpus(tmp_path / "a.jsonl")
    assert num_bytes > 8_000_000
    write_stdlib_corpus(tmp_path / "b.jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl exists already"):
        write_stdlib_corpus(tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    paths = [json.loads(line)["path"] for line in (tmp_path / "a.jsonl").open(encoding="utf-8")]
    assert len(paths) == num_documents == len(set(paths))
    tail = {path[0] for path in paths[-40:]}
    assert paths != sorted(paths) and len(tail) > 8  # not one end of the alphabet


def test_a_tokenizer_is_trained(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("hello hello hello world world\n" * 5)
    options = ("--input", tmp_path / "a.txt", "--vocab-size", "265", "--output", tmp_path / "t")
    run("tokenizer", *options)
    assert Tokenizer.load(tmp_path / "t").vocab_size == 265
    with pytest.raises(UserError, match="--overwrite"):
        run("tokenizer", *options)
    run("tokenizer", *options[:3], 5000, "--output", tmp_path / "large")
    assert "(the text has too few pairs for 5,000)" in capsys.readouterr().out
