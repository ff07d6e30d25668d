"""The corpus of the quickstart, and the tools around it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ppfleetx.config.errors import DataError
from ppfleetx.data.prepare.stdlib_corpus import stdlib_files, write_stdlib_corpus
from ppfleetx.data.tokenizer.tokenizer import Tokenizer

TOOLS = Path(__file__).resolve().parents[3] / "tools"


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


def test_the_training_tool(tmp_path):
    (tmp_path / "a.txt").write_text("hello hello hello world world\n" * 5)
    command = [sys.executable, TOOLS / "train_tokenizer.py", "--input", tmp_path / "a.txt",
               "--vocab-size", "265", "--output", tmp_path / "t"]  # fmt: skip
    first = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert first.returncode == 0, first.stderr
    assert Tokenizer.load(tmp_path / "t").vocab_size == 265
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2 and "--overwrite" in again.stderr
