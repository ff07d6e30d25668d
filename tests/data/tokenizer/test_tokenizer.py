"""The tokenizer: ids equal to the tokenizers library's, files, special tokens, decoding."""

from __future__ import annotations

import copy
import json
import pickle
import random
import re

import pytest
import tokenizers

from ppfleetx.config.errors import DataError
from ppfleetx.data.tokenizer.backends import (
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    TiktokenEngine,
    TokenizersEngine,
    Unsupported,
)
from ppfleetx.data.tokenizer.json_files import BYTE_CHARACTERS, make_definition
from ppfleetx.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from tests.helpers.texts import CORPUS, FRAGMENTS, random_text, small_tokenizer


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return small_tokenizer()


@pytest.fixture
def definition(trained) -> dict:
    return copy.deepcopy(trained.definition)


def library_of(definition: dict) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer.from_str(json.dumps(definition))
    library.encode_special_tokens = True
    return library


def assert_same_ids(definition: dict, texts: list[str]) -> None:
    tokenizer, library = Tokenizer(definition), library_of(definition)
    assert tokenizer.engine_name == "tiktoken"
    for text in texts:
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids, repr(text)


def random_texts(number: int) -> list[str]:
    rng = random.Random(11)
    return ["", *FRAGMENTS, *CORPUS, *(random_text(rng) for _ in range(number))]


def split_by(pattern: str) -> dict:
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }


@pytest.mark.parametrize("add_prefix_space", [False, True])
@pytest.mark.parametrize("use_regex", [True, False])
def test_ids_equal_the_tokenizers_library(definition, add_prefix_space, use_regex):
    definition["pre_tokenizer"] |= {"add_prefix_space": add_prefix_space, "use_regex": use_regex}
    assert_same_ids(definition, random_texts(1500))


def test_ids_equal_when_every_code_point_stands_between_letters_and_digits(definition):
    points = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000 and point % 7 in (0, 3)]
    step = 4000
    texts = ["".join(f"a{c}1{c} {c}!" for c in points[i : i + step]) for i in range(0, len(points), step)]
    assert_same_ids(definition, texts[:10] + texts[-2:])


def test_ids_equal_for_a_vocabulary_that_the_library_trained():
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    definition = json.loads(library.to_str())
    assert definition["model"]["vocab"]["<|endoftext|>"] == 0
    assert_same_ids(definition, random_texts(500))


@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("pattern", [LLAMA3_PATTERN, QWEN2_PATTERN])
def test_ids_equal_with_the_pattern_of_llama3_and_qwen2(definition, pattern, ignore_merges):
    definition["pre_tokenizer"] = split_by(pattern)
    definition["model"]["ignore_merges"] = ignore_merges
    assert_same_ids(definition, random_texts(1000))


SPECIAL = ["<|endoftext|>", "<|end|>", "<|end|>x", "<s>", "\u4f60", "  ", "\u00e9t"]


@pytest.mark.parametrize("add_prefix_space", [False, True])
@pytest.mark.parametrize("pattern", [None, LLAMA3_PATTERN])
@pytest.mark.parametrize(
    "flags", [{}, {"normalized": True}, {"lstrip": True}, {"single_word": True}], ids=str
)
def test_special_tokens_are_found_as_the_library_finds_them(definition, add_prefix_space, pattern, flags):
    """Overlapping ones, some of them looked for last, some with the spaces or the words beside them."""
    if pattern:
        definition["pre_tokenizer"] = split_by(pattern)
    else:
        definition["pre_tokenizer"]["add_prefix_space"] = add_prefix_space
    first = definition["added_tokens"][0]["id"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    definition["added_tokens"] = [
        {"id": first + place, "content": content} | plain | (flags if place % 2 else {})
        for place, content in enumerate(SPECIAL)
    ]
    tokenizer = Tokenizer(definition)
    assert tokenizer.engine_name == "tiktoken"
    library, rng = tokenizers.Tokenizer.from_str(json.dumps(definition)), random.Random(7)
    for _ in range(200):
        parts = [rng.choice([random_text(rng), rng.choice(SPECIAL)]) for _ in range(rng.randrange(7))]
        text = "".join(parts)
        expected = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode_prompt(text) == expected, repr(text)
        if not add_prefix_space:
            assert tokenizer.encode_continuation(text) == expected, repr(text)


@pytest.mark.parametrize("pattern", [None, LLAMA3_PATTERN])
@pytest.mark.parametrize(
    "text", ["x" + " " * 300_000 + "x", "a" + "\n" * 300_000 + "b" + "\t" * 99_999 + " c", "aaab" * 50_000]
)
def test_ids_equal_on_very_long_runs(definition, pattern, text):
    if pattern:
        definition["pre_tokenizer"] = split_by(pattern)
    assert_same_ids(definition, [text])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"normalizer": {"type": "NFC"}}, "normalizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre-tokenizer"),
        ({"pre_tokenizer": split_by(r"\p{L}+|\p{N}+| +")}, "known pattern"),
    ],
)
def test_what_tiktoken_cannot_express_goes_through_the_library_and_is_said_once(
    definition, caplog, change, word, monkeypatch
):
    monkeypatch.setattr("ppfleetx.data.tokenizer.backends._WARNED", set())
    definition |= change
    tokenizer, library = Tokenizer(definition), library_of(definition)
    assert Tokenizer(definition).engine_name == "tokenizers"
    assert tokenizer.engine_name == "tokenizers"
    assert len(caplog.records) == 1 and word in caplog.text
    for text in random_texts(50):
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_lone_surrogates_are_refused(trained, definition):
    definition["normalizer"] = {"type": "NFC"}
    for tokenizer in (trained, Tokenizer(definition)):
        with pytest.raises(DataError, match=r"character 2 of the text is the lone surrogate U\+D83D"):
            tokenizer.encode("ab\ud83d c")


def test_end_of_document_in_text_is_text(trained):
    ids = trained.encode("a<|endoftext|>b")
    assert trained.eod_id not in ids and len(ids) > 3
    assert trained.eod_id == trained.vocab_size - 1
    assert trained.token_bytes(trained.eod_id) == b"<|endoftext|>"


def test_another_end_of_document_token(trained, tmp_path):
    tokenizer = train_tokenizer(CORPUS, 300, special_tokens=["<eos>", "<mask>"])
    tokenizer.save(tmp_path)
    for loaded in (Tokenizer.load(tmp_path, eod_token="<eos>"), Tokenizer.load(tmp_path)):  # the file says so
        assert (loaded.eod_id, loaded.token_bytes(299), loaded.vocab_size) == (298, b"<mask>", 300)
    message = re.escape("no end-of-document token '<|endoftext|>'; its special tokens: <eos>, <mask>")
    with pytest.raises(DataError, match=message):
        _ = Tokenizer.load(tmp_path / "tokenizer.json").eod_id


def test_decoding_gives_the_text_back(trained):
    for text in random_texts(300):
        assert trained.decode(trained.encode(text)) == text
        assert trained.decode(trained.encode_to_numpy(text)) == text


def test_ids_outside_the_vocabulary_and_broken_characters(trained):
    ids = trained.encode("a\u4f60")
    assert trained.decode([trained.vocab_size + 44, *ids, -1, 10**9]) == "a\u4f60"
    assert trained.decode([*trained.encode("\U0001f41f")[:2]]) == "\ufffd"
    with_end = [*trained.encode("ab"), trained.eod_id]
    assert trained.decode(with_end) == "ab<|endoftext|>"
    assert trained.decode(with_end, skip_special_tokens=True) == "ab"
    assert trained.decode([]) == ""


@pytest.mark.parametrize("normalized", [False, True])
def test_the_stream_decoder_says_what_decode_says(definition, normalized):
    if normalized:
        definition |= {"normalizer": {"type": "NFC"}}
    tokenizer = Tokenizer(definition)
    rng = random.Random(2)
    for _ in range(100):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(30)] + tokenizer.encode(random_text(rng))
        decoder = tokenizer.stream_decoder(skip_special_tokens=True)
        pieces = [decoder.feed(token_id) for token_id in ids] + [decoder.finish()]
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_both_kinds_of_files_load_to_the_same_tokenizer(trained, tmp_path):
    trained.save(tmp_path)
    text = CORPUS[0] + CORPUS[2]
    whole = Tokenizer.load(tmp_path)
    by_name = Tokenizer.load(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").unlink()
    pair = Tokenizer.load(tmp_path)
    elsewhere = Tokenizer.from_vocab_and_merges(tmp_path / "vocab.json", tmp_path / "merges.txt")
    for tokenizer in (whole, by_name, pair, elsewhere, pickle.loads(pickle.dumps(trained))):
        assert tokenizer.encode(text) == trained.encode(text)
        assert tokenizer.fingerprint == trained.fingerprint
        assert tokenizer.vocab_size == trained.vocab_size


def test_saved_files_load_in_the_library(trained, tmp_path):
    trained.save(tmp_path)
    whole = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    model = tokenizers.models.BPE.from_file(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    pair = tokenizers.Tokenizer(model)
    pair.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in CORPUS:
        assert whole.encode(text).ids == pair.encode(text).ids == trained.encode(text)
    assert whole.token_to_id("<|endoftext|>") == trained.eod_id


def test_training_is_deterministic_and_laid_out_like_gpt2(trained):
    again = small_tokenizer()
    assert again.fingerprint == trained.fingerprint
    assert [trained.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert 300 < trained.vocab_size < 500  # no pair is left that occurs twice
    assert small_tokenizer(300).vocab_size == 300
    with pytest.raises(DataError, match="at least 257"):
        train_tokenizer(CORPUS, 256)


def random_definition(rng: random.Random, alphabet: str, num_merges: int) -> dict:
    """A tokenizer whose merges join random tokens: many pairs make the same token or can never act."""
    vocab = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
    merges: list[list[str]] = []
    made = list(alphabet)
    for _ in range(num_merges):
        pair = [rng.choice(made), rng.choice(made)]
        if pair in merges or len("".join(pair)) > 9:
            continue
        merges.append(pair)
        if "".join(pair) not in vocab:
            vocab["".join(pair)] = len(vocab)
            made.append("".join(pair))
    if rng.random() < 0.5:  # ids in another order than merges
        ids = list(vocab.values())
        rng.shuffle(ids)
        vocab = dict(zip(vocab, ids, strict=True))
    return make_definition(vocab, merges, [])


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_random_merges_give_the_ids_of_the_tokenizers_library(ignore_merges):
    rng = random.Random(7)
    compared = 0
    for _ in range(100):
        alphabet = rng.choice(["ab", "abc", "a"])
        definition = random_definition(rng, alphabet, rng.randrange(1, 25))
        definition["model"]["ignore_merges"] = ignore_merges
        try:
            quick = TiktokenEngine(definition)
        except Unsupported:
            continue
        compared += 1
        exact = TokenizersEngine(definition)
        words = ["".join(rng.choices(alphabet, k=rng.randrange(1, 30))) for _ in range(60)]
        words += list(definition["model"]["vocab"])
        for word in words:
            assert quick.encode(word).tolist() == exact.encode(word).tolist(), (definition["model"], word)
    assert compared > 30
