"""Train a byte-level BPE on a stream of text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from ppfleetx.config.errors import DataError
from ppfleetx.data.tokenizer.files import BYTE_CHARACTERS, END_OF_DOCUMENT, make_definition
from ppfleetx.data.tokenizer.tokenizer import Tokenizer


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    min_frequency: int = 2,
    special_tokens: Sequence[str] = (END_OF_DOCUMENT,),
) -> Tokenizer:
    """Learn merges from ``texts``, which are read once and not stored. The same texts give the same
    tokenizer.

    Ids are laid out as in GPT-2: the bytes, the merges in the order learned, then the special tokens, of
    which the first one ends documents. There are fewer than ``vocab_size`` if no remaining pair of neighbours
    occurs ``min_frequency`` times. Raises DataError if the vocabulary is too small, or there is no text.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers, trainers

    smallest = 256 + len(special_tokens)
    if vocab_size < smallest:
        raise DataError(
            f"vocabulary of {vocab_size}: at least {smallest} tokens are needed, for 256 bytes and "
            f"{', '.join(special_tokens)}"
        )
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special_tokens),
        min_frequency=min_frequency,
        initial_alphabet=BYTE_CHARACTERS,
        show_progress=False,
    )
    counted = _Counted(texts)
    library.train_from_iterator(counted, trainer)
    if not counted.characters:
        raise DataError("there is no text to train a tokenizer on")
    trained = [list(pair) for pair in json.loads(library.to_str())["model"]["merges"]]
    vocab = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
    for left, right in trained:
        vocab.setdefault(left + right, len(vocab))
    for token in special_tokens:
        vocab[token] = len(vocab)
    definition = make_definition(vocab, trained, list(special_tokens))
    return Tokenizer(definition, eod_token=special_tokens[0], place="the trained tokenizer")


class _Counted:
    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.characters = 0

    def __iter__(self):
        for text in self._texts:
            self.characters += len(text)
            yield text
