"""Token ids of ``AutoTokenizer`` on the same directories (recipe: tests/goldens/make_hf_tokenizers.py)."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest

from ppfleetx.data.tokenizer.tokenizer import Tokenizer

GOLDENS = Path(__file__).parents[2] / "goldens"
DIRECTORIES = GOLDENS / "tokenizers"
GOLDEN = json.loads((GOLDENS / "hf_tokenizers.json").read_text(encoding="utf-8"))
ENGINES = {"gpt2": "tiktoken", "gpt2_pair": "tiktoken", "llama3": "tiktoken"}


@pytest.fixture(scope="module", params=GOLDEN)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.load(DIRECTORIES / name)


def test_ids_are_those_of_transformers(name: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.engine_name == ENGINES.get(name, "tokenizers")
    assert len(GOLDEN[name]["texts"]) > 60
    for row in GOLDEN[name]["texts"]:
        text = row["text"]
        assert tokenizer.encode_prompt(text) == row["ids"], text
        assert tokenizer.encode_prompt(text, add_special_tokens=False) == row["bare"], text
        assert tokenizer.encode(text) == row["plain"], text
        plain = tokenizer.encode_prompt(text, add_special_tokens=False, parse_special_tokens=False)
        assert plain == row["plain"], text


def test_texts_are_those_of_transformers(name: str, tokenizer: Tokenizer) -> None:
    for ids, text, without_special in GOLDEN[name]["decoded"]:
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == without_special
        for skip, expected in ((False, text), (True, without_special)):
            stream = tokenizer.stream_decoder(skip_special_tokens=skip)
            assert "".join([*map(stream.feed, ids), stream.finish()]) == expected


def test_vocabulary_and_special_tokens_are_those_of_transformers(name: str, tokenizer: Tokenizer) -> None:
    golden = GOLDEN[name]
    assert tokenizer.vocab_size == golden["size"]
    assert tokenizer.eod_id == (tokenizer.vocab_size - 1 if golden["eos"] is None else golden["eos"])
    assert set(golden["special"]) <= tokenizer.special_ids
    if golden["bos"] is not None:
        assert tokenizer.start_id == golden["bos"]


def test_saved_and_pickled_it_stays_what_it_is(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    for other in (Tokenizer.load(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert other.fingerprint == tokenizer.fingerprint
        assert (other.end_ids, other.prefix_ids, other.suffix_ids) == (
            tokenizer.end_ids,
            tokenizer.prefix_ids,
            tokenizer.suffix_ids,
        )
        for row in GOLDEN[name]["texts"]:
            assert other.encode_prompt(row["text"]) == row["ids"]


def test_a_continuation_is_what_follows(name: str, tokenizer: Tokenizer) -> None:
    """No BOS, no EOS, and no space of the tokenizer's own: its text is what was given."""
    for row in GOLDEN[name]["texts"]:
        ids = tokenizer.encode_continuation(row["text"])
        stream = tokenizer.stream_decoder(after=tokenizer.encode_prompt("Hello", add_special_tokens=False))
        text = row["text"]
        if name.startswith("llama2"):
            text = text.replace("\u2581", " ")
        if name == "chat":
            text = text.replace(" <wide> ", "<wide>")  # that token takes the spaces with it
        assert "".join([*map(stream.feed, ids), stream.finish()]) == text


def test_end_tokens_are_those_of_the_generation_config() -> None:
    third = Tokenizer.load(DIRECTORIES / "llama3")
    texts = [third.decode([token_id]) for token_id in third.end_ids]
    assert texts == ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"]
    assert Tokenizer.load(DIRECTORIES / "llama2").end_ids == (2,)
    assert Tokenizer.load(DIRECTORIES / "gpt2").end_ids == (420,)


SPECIAL_MAP = {"additional_special_tokens": ["<aj>", "<extra 1>"], "pad_token": "<x"}
EXTRA_MAP = {"extra_special_tokens": ["<mb>", {"content": "<me>", "lstrip": True, "normalized": False}]}
ADDED = {"<aj>": 999, "<ai>": 700, "<x": 701}


@pytest.mark.parametrize(
    ("config", "special_map", "added", "ids", "without_special"),
    [
        ({}, SPECIAL_MAP, ADDED, [423, 424, *b"<mb>", *b"<me>", 422], "<aj><mb><me>"),
        (
            {"additional_special_tokens": ["<mb>"], "extra_special_tokens": []},
            SPECIAL_MAP,
            ADDED,
            [423, *b"<extra 1>", 424, *b"<me>", 422],
            "<aj><extra 1><me>",
        ),
        (
            {"extra_special_tokens": {"image_token": "<mb>"}},
            SPECIAL_MAP,
            ADDED,
            [423, 425, 424, *b"<me>", 422],
            "<aj><me>",
        ),
        (
            {"extra_special_tokens": ["<fin>"]},
            EXTRA_MAP,
            {},
            [*b"<aj>", *b"<extra 1>", 422, 423, *b"<x"],
            "<aj><extra 1><x",
        ),
    ],
    ids=["map alone", "both", "named", "both lists"],
)
def test_extra_special_tokens_of_several_files(
    tmp_path: Path, config: dict, special_map: dict, added: dict, ids: list[int], without_special: str
) -> None:
    """What transformers 5.23 has for these files. The bytes stand for plain text."""
    directory = shutil.copytree(DIRECTORIES / "gpt2", tmp_path / "gpt2")
    for name, content in (
        ("tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", **config}),
        ("special_tokens_map.json", special_map),
        ("added_tokens.json", added),
    ):
        (directory / name).write_text(json.dumps(content))
    tokenizer = Tokenizer.load(directory)
    got = tokenizer.encode_prompt("<aj><extra 1><mb><me><x")
    assert [one for one in got if one >= 420] == [one for one in ids if one >= 420]
    assert b"".join(map(tokenizer.token_bytes, (i for i in got if i < 420))) == bytes(
        one for one in ids if one < 256
    )
    assert tokenizer.decode(got, skip_special_tokens=True) == without_special


@pytest.mark.parametrize("name", ["gpt2", "gpt2_pair"])
def test_a_space_before_a_text_where_the_configuration_says_so(tmp_path: Path, name: str) -> None:
    plain = Tokenizer.load(DIRECTORIES / name)
    directory = shutil.copytree(DIRECTORIES / name, tmp_path / name)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | settings))
    spaced = Tokenizer.load(directory)
    assert spaced.encode_prompt("Hello world") == plain.encode_prompt(" Hello world")
    assert spaced.encode_continuation("Hello") == plain.encode_continuation("Hello")
    assert spaced.fingerprint != plain.fingerprint


def test_special_tokens_stay_text_where_the_directory_says_so(tmp_path: Path) -> None:
    shutil.copytree(DIRECTORIES / "llama3", tmp_path / "split")
    path = tmp_path / "split" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"split_special_tokens": True}))
    tokenizer = Tokenizer.load(tmp_path / "split")
    assert tokenizer.encode_prompt("<|eot_id|>")[1:] == tokenizer.encode("<|eot_id|>")


def test_another_end_token_is_kept_when_it_is_saved(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(DIRECTORIES / "llama3", eod_token="<|end_of_text|>")
    tokenizer.save(tmp_path)
    assert (
        Tokenizer.load(tmp_path).eod_id == tokenizer.eod_id != Tokenizer.load(DIRECTORIES / "llama3").eod_id
    )
