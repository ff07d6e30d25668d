"""Merges and ranks agree: random merge lists, good and bad, against the tokenizers library."""

from __future__ import annotations

import random

import pytest

from ppfleetx.data.tokenizer.engines import (
    TiktokenEngine,
    TokenizersEngine,
    Unsupported,
    live_ranks,
    split_by_ranks,
)
from ppfleetx.data.tokenizer.files import BYTE_CHARACTERS, make_definition


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
    for _ in range(250):
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
    assert compared > 80


def test_a_merge_that_a_better_one_always_prevents_is_left_out():
    # In "abc", b and c join first, so "ab" never stands beside "c".
    merges = [(b"b", b"c"), (b"a", b"b"), (b"ab", b"c")]
    assert live_ranks(merges) == {b"bc": 0, b"ab": 1}


def test_two_ways_to_one_token_keep_the_rank_of_the_one_that_happens():
    merges = [(b"b", b"c"), (b"a", b"b"), (b"ab", b"c"), (b"x", b"y"), (b"a", b"bc")]
    ranks = live_ranks(merges)
    assert ranks is not None
    assert ranks[b"abc"] == 4
    assert split_by_ranks(b"abcab", ranks) == [b"abc", b"ab"]


def test_a_merge_listed_before_its_half_is_made_cannot_be_ranked():
    assert live_ranks([(b"ab", b"c"), (b"a", b"b")]) is None
