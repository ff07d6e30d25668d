"""Check that the token ids of a tokenizer or a corpus are ids of the model."""

from __future__ import annotations

import numpy as np

from ppfleetx.config.errors import DataError
from ppfleetx.data.indexed import TokenStore
from ppfleetx.data.tokenizer.tokenizer import Tokenizer

_PART = 1 << 16  # tokens that are read in one go


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise DataError if a tokenizer has more ids than a model with ``vocab_size`` tokens. The model may have
    more."""
    count = tokenizer.vocab_size
    if count > vocab_size:
        raise DataError(
            f"{tokenizer.place} has {count} token ids, added tokens included, and the model {vocab_size} "
            "(Model.vocab_size). Name the tokenizer that the model was trained with (Data.tokenizer.dir); a "
            f"new model gets -o Model.vocab_size={count}"
        )


def check_corpus(corpus: TokenStore, vocab_size: int, *, most_tokens: int = 1 << 24) -> tuple[int, int]:
    """Raise DataError if a corpus has an id that a model with ``vocab_size`` tokens lacks.

    A corpus of more than ``most_tokens`` is read in evenly spaced parts; the other ids are checked when they
    are read for training. Returns the highest id found (-1 if there is no token), and the number of tokens
    read.
    """
    highest, seen = -1, 0
    for first, last in _parts(corpus.num_tokens, most_tokens):
        tokens = corpus.flat(first, last)
        lowest, highest, seen = int(tokens.min()), max(highest, int(tokens.max())), seen + len(tokens)
        if highest >= vocab_size or lowest < 0:
            wrong = lowest if lowest < 0 else highest
            raise DataError(
                f"{corpus.prefix} holds the token id {wrong}, and the model has ids 0 to {vocab_size - 1} "
                f"(Model.vocab_size = {vocab_size}). Either the corpus was made with another tokenizer, or a "
                f"new model needs -o Model.vocab_size={max(highest + 1, vocab_size)} or more"
            )
    return highest, seen


def _parts(num_tokens: int, most_tokens: int) -> list[tuple[int, int]]:
    if num_tokens <= most_tokens:
        starts = range(0, num_tokens, _PART)
    else:
        count = max(2, most_tokens // _PART)
        starts = np.linspace(0, num_tokens - _PART, count).astype(np.int64).tolist()
    return [(start, min(start + _PART, num_tokens)) for start in starts]
