"""WikiText to corpora: text in the published form, word by word."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from ppfleetx.config.errors import DataError
from ppfleetx.data.indexed_dataset import IndexedDataset
from ppfleetx.data.prepare.wikitext import passages, prepare_wikitext
from ppfleetx.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from tests.data.conftest import sequences

TEXT = """\
 \n = Robert Boulter = \n \n
 Robert Boulter is an English film , television and theatre actor . He had a role in " Herons " ( 2000 ) .
 The word 's end @-@ rhyme costs 1 @,@ 000 or 1 @.@ 5 ; is that all ?
 \n = = Career = = \n \n
 = = = 2000 – 2005 = = = \n
 In 2000 Boulter had a guest @-@ starring role : it was his .
 \n = Next article = \n
 The last passage has no heading after it .
"""
PASSAGES = [
    'Robert Boulter is an English film, television and theatre actor. He had a role in "Herons" (2000). '
    "The word's end-rhyme costs 1,000 or 1.5; is that all?",
    "In 2000 Boulter had a guest-starring role: it was his.",
    "The last passage has no heading after it.",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([TEXT * 3], vocab_size=300)


def test_passages_are_ordinary_text_and_none_is_lost() -> None:
    assert list(passages(iter(TEXT.splitlines(keepends=True)))) == PASSAGES


@pytest.mark.parametrize("as_zip", [False, True])
def test_zip_and_folder_become_corpora(tmp_path: Path, tokenizer: Tokenizer, as_zip: bool) -> None:
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    for split, text in (("train", TEXT * 2), ("valid", TEXT), ("test", TEXT)):
        (folder / f"wiki.{split}.tokens").write_text(text, "utf-8")
    source = folder
    if as_zip:
        source = tmp_path / "wikitext-2-v1.zip"
        with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in folder.iterdir():
                archive.write(path, f"wikitext-2/{path.name}")
    reports = prepare_wikitext(source, tmp_path / "out", tokenizer, length=16)
    passages_of = {report.split: report.passages for report in reports}
    assert passages_of == {"train": 6, "valid": 3, "test": 3}
    corpus = IndexedDataset(tmp_path / "out/valid/wikitext")
    documents = sequences(corpus)
    assert all(ids[-1] == tokenizer.eod_id for ids in documents)
    assert [tokenizer.decode(ids[:-1]) for ids in documents] == PASSAGES
    assert reports[1].tokens == sum(map(len, documents))
    assert reports[1].windows == (reports[1].tokens - 1) // 16
    with pytest.raises(DataError, match="exists already"):
        prepare_wikitext(source, tmp_path / "out", tokenizer, length=16)


def test_what_is_no_wikitext(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def refused(source: Path, words: str, length: int = 8) -> None:
        with pytest.raises(DataError, match=words):
            prepare_wikitext(source, tmp_path / "out", tokenizer, length=length)

    refused(tmp_path / "none", "no such zip or folder")
    (tmp_path / "text.zip").write_text("no zip")
    refused(tmp_path / "text.zip", "neither a folder nor a zip")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "holds no wiki.train.tokens")
    (tmp_path / "empty/wiki.train.tokens").write_text(" = only a heading = \n")
    refused(tmp_path / "empty", "holds no text")
    (tmp_path / "empty/wiki.train.tokens").write_bytes(b"\xff\xfe")
    refused(tmp_path / "empty", "not UTF-8")
    (tmp_path / "empty/wiki.train.tokens").write_text("three words here")
    refused(tmp_path / "empty", "too few for a window of 100", length=100)
