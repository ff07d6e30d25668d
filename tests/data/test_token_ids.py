"""Token ids of tokenizers and corpora against ``Model.vocab_size``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.commands.main import call
from ppfleetx.config.errors import DataError
from ppfleetx.config.loader import load_config
from ppfleetx.data import corpus_checks
from ppfleetx.data.corpus_checks import check_corpus, token_id_lines
from ppfleetx.data.indexed_dataset import IndexedDatasetWriter
from ppfleetx.data.tokenized_corpus import open_tokens
from ppfleetx.data.tokenizer.tokenizer import train_tokenizer


def write_corpus(prefix: Path, tokens: np.ndarray, dtype: type = np.uint16) -> None:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        writer.add_document(tokens, [len(tokens)])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 271 ids, and a corpus with ids up to 270."""
    place = tmp_path_factory.mktemp("ids")
    train_tokenizer(["the cat and the hat and the other cat"] * 3, 300).save(place / "tokenizer")
    write_corpus(place / "corpus", np.arange(2000) % 271)
    sections = {
        "Global": {"device": "cpu", "local_batch_size": 1},
        "Model": {"vocab_size": 271, "hidden_size": 32, "num_layers": 1, "num_attention_heads": 4},
        "Engine": {"max_steps": 2, "save_load": {"output_dir": str(place / "out")}},
        "Data": {
            "Train": {"dataset": {"input_dir": str(place / "corpus"), "max_seq_len": 32, "split": [1, 0, 0]}},
            "tokenizer": {"dir": str(place / "tokenizer")},
        },
    }
    (place / "run.yaml").write_text(json.dumps(sections))
    return place


def test_what_fits_is_said(place: Path) -> None:
    tokenizer, corpus = token_id_lines(load_config(place / "run.yaml"))
    assert tokenizer.endswith("tokenizer has 271 token ids")
    assert corpus.endswith("corpus has token ids up to 270")
    assert len(token_id_lines(load_config(place / "run.yaml", ["Model.vocab_size=50304"]))) == 2


@pytest.mark.parametrize("verb", ["check", "train"])
def test_a_tokenizer_larger_than_the_vocabulary_is_refused(
    place: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError) as caught:
        call(verb, ["-c", str(place / "run.yaml"), "-o", "Model.vocab_size=200"])
    for words in (
        "has 271 token ids, added tokens included, and the model 200 (Model.vocab_size)",
        "-o Model.vocab_size=271",
        "Model.vocab_size is in -o override 1",
        f"Data.tokenizer.dir is in {place / 'run.yaml'}:",
    ):
        assert words in str(caught.value)
    assert verb == "train" or "is valid" not in capsys.readouterr().out
    assert not (place / "out" / "latest").exists()


def test_tokens_that_only_the_other_files_name_count(place: Path, tmp_path: Path) -> None:
    cfg = load_config(place / "run.yaml", [f"Data.tokenizer.dir={tmp_path}"])
    for file in (place / "tokenizer").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert token_id_lines(cfg)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": "[PAD]"}))
    with pytest.raises(DataError, match="has 272 token ids, added tokens included, and the model 271"):
        token_id_lines(cfg)
    beyond = cfg.changed("Engine", save_load=cfg.Engine.save_load.model_copy(update={"init_from": "weights"}))
    assert token_id_lines(beyond)[0].endswith("has 271 token ids")  # texts with the added token are refused


def test_a_corpus_of_larger_ids_is_refused(place: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "large", np.arange(500))
    options = [f"Data.Train.dataset.input_dir={tmp_path / 'large'}"]
    words = (
        r"large holds the token id 499, and the model has ids 0 to 270 .*another tokenizer.*vocab_size=500"
    )
    with pytest.raises(DataError, match=words):
        token_id_lines(load_config(place / "run.yaml", options))
    write_corpus(tmp_path / "negative", np.array([5, -3, 7]), np.int32)
    options = [f"Data.Train.dataset.input_dir={tmp_path / 'negative'}"]
    with pytest.raises(DataError, match="negative holds the token id -3"):
        token_id_lines(load_config(place / "run.yaml", options))


def test_files_that_are_elsewhere_are_no_mistake(place: Path) -> None:
    options = ["Data.Train.dataset.input_dir=nowhere/corpus", "Data.tokenizer.dir=nowhere"]
    tokenizer, corpus = token_id_lines(load_config(place / "run.yaml", options))
    assert "the tokenizer is not here" in tokenizer
    assert "a corpus is not here" in corpus


def test_parts_of_a_large_corpus_are_looked_at(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.zeros(1 << 20, np.uint16)
    tokens[-1] = 7
    write_corpus(tmp_path / "long", tokens)
    corpus = open_tokens(tmp_path / "long")
    assert check_corpus(corpus, 8) == (7, 1 << 20)
    assert check_corpus(corpus, 8, most_tokens=1 << 18) == (7, 1 << 18)
    with pytest.raises(DataError, match="token id 7, and the model has ids 0 to 6"):
        check_corpus(corpus, 7, most_tokens=1 << 18)
    # Where two parts would overlap, all tokens are read, each once.
    for size in (2000, 100_000):
        write_corpus(tmp_path / f"of_{size}", tokens[-size:])
        assert check_corpus(open_tokens(tmp_path / f"of_{size}"), 8, most_tokens=size // 2) == (7, size)
    monkeypatch.setattr(corpus_checks, "_MOST_TOKENS", 1)
    options = [f"Data.Train.dataset.input_dir={tmp_path / 'long'}"]
    assert token_id_lines(load_config(place / "run.yaml", options))[1].endswith(
        "has token ids up to 7 in 262,144 of 1,048,576 tokens"
    )
    assert check_corpus(open_tokens(place / "corpus"), 271) == (270, 2000)
