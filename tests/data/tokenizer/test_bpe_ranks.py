"""BPE merges converted to ranks give the ids of the tokenizers library, on random merge lists."""

from __future__ import annotations

import random

import pytest

from ppfleetx.data.tokenizer.engines import TiktokenEngine, TokenizersEngine, Unsupported
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
