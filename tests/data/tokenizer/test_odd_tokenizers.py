"""Damaged and inconsistent tokenizer files are rejected with a message that names the file."""

import json
import shutil
from pathlib import Path

import pytest

from ppfleetx.config.errors import DataError
from ppfleetx.data.tokenizer.json_files import BYTE_CHARACTERS, make_definition
from ppfleetx.data.tokenizer.tokenizer import Tokenizer

GPT2 = Path(__file__).parents[2] / "goldens/tokenizers/gpt2"
BYTES = {character: number for number, character in enumerate(BYTE_CHARACTERS)}


def definition(**changes):
    """A tokenizer of bytes and "ab", with other values for some keys."""
    vocab = {**BYTES, "<|endoftext|>": 256, "ab": 257}
    return make_definition(vocab, [["a", "b"]], ["<|endoftext|>"]) | changes


def with_model(**changes):
    whole = definition()
    return whole | {"model": whole["model"] | changes}


def cut_by(pattern):
    """With a pre-tokenizer that cuts text up by a pattern of the file's."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return definition(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]})


UNKNOWN = "is damaged or of an unknown kind"
ODD = {
    "model is a list": (definition(model=[]), "is damaged"),
    "merges are numbers": (with_model(merges=[5]), "is damaged"),
    "no vocabulary": (with_model(vocab=None), "is damaged"),
    "a negative id": (with_model(vocab={"a": -1}, merges=[]), "integers from 0"),
    "added tokens are an object": (definition(added_tokens={"a": 1}), "is damaged"),
    "an added token is a list": (
        definition(model={"type": "WordLevel"}, added_tokens=[{"content": [], "id": 1}]),
        "added token",
    ),
    "a normalizer is a text": (definition(normalizer="x"), "normalizer is 'x'"),
    "a sequence of nothing": (definition(pre_tokenizer={"type": "Sequence"}), UNKNOWN),
    "an unknown normalizer": (definition(normalizer={"type": 5}), UNKNOWN),
    "the pattern is none": (cut_by("("), UNKNOWN),
    "a key twice": ('{"model": {}, "model": {}}', "the key 'model' occurs twice"),
    "an unknown post-processor": (definition(post_processor={"type": "New"}), "post-processor"),
    "no JSON": ("{", "not valid JSON"),
    "a merge of an unknown token": (with_model(vocab={"a": 0}, merges=["a b"]), "'b', not in the vocabulary"),
    "two tokens of one id": (with_model(vocab={"a": 0, "b": 0}, merges=[]), "share an id"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_odd_files_are_refused(tmp_path, kind):
    content, words = ODD[kind]
    path = tmp_path / "tokenizer.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError, match=words) as caught:
        Tokenizer.load(tmp_path).encode("x" * 40)
    assert str(tmp_path) in str(caught.value) and len(str(caught.value)) < 600


def test_text_that_a_vocabulary_has_no_token_for(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition(model=model)))
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(DataError, match=r"cannot encode a text: .*Missing"):
        tokenizer.encode("b")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", '{"a": 0}', "merges.txt cannot be read: No such file"),
        ("merges.txt", "a b", "vocab.json cannot be read: No such file"),
        ("other.txt", "", "holds no tokenizer"),
        ("tokenizer/vocab.json", "{}", r"holds no tokenizer.*; there is one in .*/tokenizer$"),
        ("tokenizer.model", "\n", r"tokenizer\.model is not read here.*save_pretrained"),
    ],
)
def test_a_directory_without_a_whole_tokenizer(tmp_path, name, content, message):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        Tokenizer.load(tmp_path)
    with pytest.raises(DataError, match=r"no tokenizer at .*ppfleetx tokenizer"):
        Tokenizer.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json is not a JSON object"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "must name tokens by their ids"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"7": 3}}', r"decoder\.7 is not a token: 3"),
        ("tokenizer_config.json", '{"eos_token": {"a": 1}}', "eos_token is not a token"),
        ("tokenizer_config.json", '{"extra_special_tokens": 4}', "must be a list of tokens"),
        ("added_tokens.json", '{"<x>": "y"}', "gives each token its id"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id must be token ids, not '2'"),
    ],
)
def test_odd_files_beside_it_are_refused(tmp_path, file, content, message):
    directory = shutil.copytree(GPT2, tmp_path / "gpt2")
    (directory / file).write_text(content)
    with pytest.raises(DataError, match=message):
        _ = Tokenizer.load(directory).end_ids
