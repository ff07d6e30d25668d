"""Evaluation sets: the context of each scored token, batching, and unreadable files."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.config.errors import UserError
from ppfleetx.config.sections.generation import OfflineEvalConfig
from ppfleetx.data.tasks.evaluation import (
    LastWords,
    SlidingWindows,
    Window,
    detokenizer,
    detokenizer_of_file,
    num_batches,
    read_evaluation_set,
    window_batches,
)
from ppfleetx.data.tokenizer.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["the cat and the hat and the other cat"] * 3, 300)


def sliding(num_tokens: int, length: int, stride: int) -> SlidingWindows:
    return SlidingWindows(np.arange(100, 100 + num_tokens), length, stride, num_words=3, detokenizer="none")


def scored(batches: list[dict[str, np.ndarray]]) -> dict[int, int]:
    """{label: tokens before it in its row}, each label once."""
    found: dict[int, int] = {}
    for batch in batches:
        for row, column in np.argwhere(batch["loss_mask"] > 0):
            label = int(batch["labels"][row, column])
            assert label not in found
            found[label] = int(column) + 1
            assert (batch["tokens"][row, : column + 1] == np.arange(label - column - 1, label)).all()
    return found


@pytest.mark.parametrize("stride", [1, 3, 7, 8])
def test_every_token_but_the_first_is_scored_once_with_the_context_there_is(stride: int) -> None:
    length = 8
    for num_tokens, batch_size, data_size in product(range(2, 40), (1, 3, 16), (1, 2, 3)):
        windows = sliding(num_tokens, length, stride)
        ranks = [
            list(window_batches(windows, batch_size, rank, data_size, multiple_of=2))
            for rank in range(data_size)
        ]
        counts = {len(batches) for batches in ranks}
        assert counts == {num_batches(windows, batch_size, data_size)}
        assert all(batch["tokens"].shape[1] % 2 == 0 for batches in ranks for batch in batches)
        found = scored([batch for batches in ranks for batch in batches])
        assert found.keys() == set(range(101, 100 + num_tokens))
        for label, context in found.items():
            position = label - 100  # tokens of the text before it
            new = (position - length - 1) // stride + 1 if position > length else 0
            assert context == position - new * stride
            assert context == position or context > length - stride


def test_texts_of_unequal_length_are_padded_on_the_right() -> None:
    given = [Window(np.arange(size), 1) for size in (3, 6, 4)]
    texts = LastWords(given)
    assert texts.order == [1, 2, 0]
    [batch] = window_batches(texts, 4)
    assert batch["tokens"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 0], [0, 1, 0, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0]]
    assert batch["labels"][1, 2] == 3


def test_a_text_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "wiki.tokens"
    path.write_bytes(b" the @-@ cat \r\n the  hat \n")
    cfg = OfflineEvalConfig(eval_path=str(path))
    windows = read_evaluation_set(cfg, tokenizer)
    assert windows.detokenizer == "wikitext"
    assert tokenizer.decode(windows.ids) == " the-cat \r\nthe  hat\n"
    assert windows.num_words == 7  # the, @-@, cat, \r\n, the, nothing between two spaces, hat
    plain = read_evaluation_set(cfg.model_copy(update={"detokenizer": "none"}), tokenizer)
    assert tokenizer.decode(plain.ids) == " the @-@ cat \r\n the  hat \n"


def test_json_lines_are_no_plain_text(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "the cat"}\n')
    read_evaluation_set(OfflineEvalConfig(eval_path=str(path)), tokenizer)
    assert "texts.jsonl is evaluated as plain text, including its JSON notation" in caplog.text


def test_a_cloze_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    lines = ["the cat and the hat, zebra cat zebra ", "a\n b"]
    path.write_text("\n\n".join(json.dumps({"text": text, "id": 3}) for text in lines) + "\n")
    cfg = OfflineEvalConfig(eval_path=str(path), cloze_eval=True)
    first, second = read_evaluation_set(cfg, tokenizer)
    target = tokenizer.encode(" zebra")
    assert len(target) > 1
    assert first.num_scored == len(target)
    assert first.ids.tolist() == tokenizer.encode("the cat and the hat, zebra cat") + target
    assert second.ids.tolist() == tokenizer.encode("a") + tokenizer.encode(" b")
    short = cfg.model_copy(update={"max_seq_len": len(target) + 1})
    cut = read_evaluation_set(short, tokenizer)[0]
    assert (cut.ids.tolist(), cut.num_scored) == (first.ids.tolist()[-len(target) - 2 :], len(target))
    loose = read_evaluation_set(cfg.model_copy(update={"cloze_strict": False}), tokenizer)
    assert loose[0].ids.tolist() == tokenizer.encode(lines[0])
    assert {window.num_scored for window in loose} == {1}


GOOD = json.dumps({"text": "a b"})


@pytest.mark.parametrize(
    ("content", "keys", "words"),
    [
        (None, {}, ["Offline_Eval.eval_path", "No such file"]),
        (b" \n", {}, ["Offline_Eval.eval_path", "is empty"]),
        (b"\xff\xfe", {}, ["is not UTF-8 text"]),
        (b"a", {}, ["1 token leaves nothing to predict"]),
        (f"{GOOD}\nnope".encode(), {"cloze_eval": True}, ["file:2: this is not a line of JSON"]),
        (b'{"text": "a \\ud800 b"}', {"cloze_eval": True}, ["file:1:", "lone surrogate"]),
        (f"{GOOD}\n\n[1]".encode(), {"cloze_eval": True}, ["file:3: must be an object", '"text"']),
        (f'{GOOD}\n{{"text": 3}}'.encode(), {"cloze_eval": True}, ["file:2: field 'text' must be a text"]),
        (b'{"text": " alone "}', {"cloze_eval": True}, ["file:1: needs a context"]),
        (
            b'{"text": "a zzzzzzzz"}',
            {"cloze_eval": True, "max_seq_len": 4},
            ["file:1: the last word has 9 tokens, a window 4", "Offline_Eval.max_seq_len"],
        ),
    ],
)
def test_files_that_cannot_be_evaluated(
    tokenizer: Tokenizer, tmp_path: Path, content: bytes | None, keys: dict, words: list[str]
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_evaluation_set(OfflineEvalConfig(eval_path=str(path), **keys), tokenizer)
    for word in words:
        assert word in str(caught.value)


def test_no_file_is_named() -> None:
    with pytest.raises(UserError, match="jsonl"):
        read_evaluation_set(OfflineEvalConfig(cloze_eval=True), None)


# Written by hand from the published files' conventions.
WIKITEXT = [
    (" The @-@ cat 's 1 @,@ 000 . 5 @.@ 2 ", " The-cat's 1,000. 5.2 "),
    ("the dogs ' house", "the dogs' house"),
    ("a ( b ) [ c ] { d } e", "a (b) [c] {d} e"),
    ("he said \" oh no \" and ' yes ' then", "he said \"oh no\" and 'yes' then"),
    ("one , two ; three : four ! five ? six", "one, two; three: four! five? six"),
    (" \n = Title = \n \n = = Part = = \n text \n", "\n= Title =\n\n== Part ==\ntext\n"),
    ("= = = = deep = = = =", "==== deep ===="),
    ("20 \N{DEGREE SIGN} C and N people", "20\N{DEGREE SIGN}C and 1 people"),
    ("naïve <unk> 中文", "naïve <unk> 中文"),
]
PTB = [
    (" it 's n't \n for N years \n", " it'sn't\nfor1 years\n"),
    ("do n't 'em", "don't'em"),
    ("rose # N to $ 1", "rose #1 to $1"),
]


@pytest.mark.parametrize(("text", "plain"), WIKITEXT)
def test_wikitext(text: str, plain: str) -> None:
    assert detokenizer("wikitext")(text) == plain


@pytest.mark.parametrize(("text", "plain"), PTB)
def test_ptb(text: str, plain: str) -> None:
    assert detokenizer("ptb")(text) == plain


@pytest.mark.parametrize("name", ["lambada", "none"])
def test_texts_that_stay(name: str) -> None:
    text = " a , b @-@ c 's \n"
    assert detokenizer(name)(text) == text


def test_wikitext_is_the_harnesses() -> None:
    harness = pytest.importorskip(
        "lm_eval.tasks.wikitext.preprocess_wikitext", reason="needs pip install 'ppfleetx[lm_eval]'"
    )
    for text, plain in [*WIKITEXT, ("/' [0-9]/ /' 3/ s ' x ' y", None), ("( ( a ) ) \" b ' c \" d '", None)]:
        found = harness.wikitext_detokenizer({"page": text})
        assert detokenizer("wikitext")(text) == found
        assert plain in (None, found)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("wikitext-103/wiki.valid.tokens", "wikitext"),
        ("WikiText.txt", "wikitext"),
        ("data/ptb.test.txt", "ptb"),
        ("wiki/book.txt", "none"),  # the file's name counts, not its directory's
        ("lambada_test.jsonl", "none"),
    ],
)
def test_name_of_a_file(path: str, name: str) -> None:
    assert detokenizer_of_file(path) == name
