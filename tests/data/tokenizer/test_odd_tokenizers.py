"""Tokenizer files that are damaged or lie are refused in a sentence that names the file, and soon."""

import json

import pytest

from ppfleetx.config.errors import DataError
from ppfleetx.data.tokenizer.files import BYTE_CHARACTERS, make_definition
from ppfleetx.data.tokenizer.tokenizer import Tokenizer

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


def sequence(steps):
    return definition(pre_tokenizer={"type": "Sequence", "pretokenizers": steps})


UNKNOWN = "is damaged or of an unknown kind"
ODD = {
    "model is a list": (definition(model=[]), "it has no model"),
    "type is a list": (with_model(type=["BPE"]), UNKNOWN),
    "merges are numbers": (with_model(merges=[5]), "merge 5 is not a pair"),
    "merges are lists of lists": (with_model(merges=[[["a"], "b"]]), r"merge \(\['a'\], 'b'\) is not a pair"),
    "a merge of three": (with_model(merges=["a b c"]), r"merge \('a', 'b', 'c'\) is not a pair"),
    "no vocabulary": (with_model(vocab=None), "a BPE model needs a vocabulary"),
    "an id far away": (with_model(vocab={"a": 10**12}, merges=[]), "integers from 0 to 16777215"),
    "an id that is true": (with_model(vocab={"a": True}, merges=[]), "integers from 0 to 16777215"),
    "added tokens are an object": (definition(added_tokens={"a": 1}), r"added_tokens is \{'a': 1\}"),
    "an added id far away": (definition(added_tokens=[{"id": 10**9, "content": "x"}]), "added token"),
    "an added token is a text": (definition(added_tokens=["x"]), "added token 'x'"),
    "the normalizer is a list": (definition(normalizer=[1]), r"normalizer is \[1\]"),
    "an unknown normalizer": (definition(normalizer={"type": 5}), UNKNOWN),
    "the pre-tokenizer is a text": (definition(pre_tokenizer="x"), "pre_tokenizer is 'x'"),
    "steps are a text": (sequence("x"), UNKNOWN),
    "steps are texts": (sequence(["x"]), UNKNOWN),
    "the pattern is a number": (cut_by(5), UNKNOWN),
    "the pattern is none": (cut_by("("), UNKNOWN),
    "the pattern tries for ever": (cut_by("(x+x+)+y|(a|a)+$|(?:.*.*)*z"), "cannot encode a text"),
    "an empty unigram": (definition(model={"type": "Unigram", "vocab": [], "unk_id": 0}), UNKNOWN),
    "a key twice": ('{"model": {}, "model": {}}', "the key 'model' occurs twice"),
    "a deep one": ('{"model": ' + "[" * 100_000, "nested too deeply"),
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
