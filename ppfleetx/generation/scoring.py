"""How likely the tokens of a given text are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle

from ppfleetx.generation.cache import GrowingCache
from ppfleetx.generation.sampling import TokenScore, score_tokens
from ppfleetx.generation.session import NextTokenModel

# The logits of so many positions are in memory at a time.
_COLUMNS = 128


def score_prompt(model: NextTokenModel, tokens: Sequence[int], num_top: int) -> list[TokenScore]:
    """The score of each of ``tokens``, one or more, given those before it; the first has none.

    Args:
        model: gives the logits.
        tokens: a text.
        num_top: so many of the likeliest tokens are told in each place.
    """
    cache, scores = GrowingCache(), [TokenScore(tokens[0], None)]
    given = np.array(tokens, np.int64)[None, :-1]
    for start in range(0, given.shape[1], _COLUMNS):
        part = given[:, start : start + _COLUMNS]
        end = start + part.shape[1]
        positions = np.arange(start, end, dtype=np.int64)[None]
        logits = model.with_cache(
            paddle.to_tensor(part), paddle.to_tensor(positions), np.ones((1, end), bool), cache, part.shape[1]
        )
        scores += score_tokens(logits, list(tokens[start + 1 : end + 1]), num_top)
    return scores
