"""Several tokens a step for a single row: guesses from its own text, checked by the model in one pass.

Text repeats itself: what followed the last tokens where they stood before often follows again (Saxena, 2023,
"Prompt lookup decoding"). A pass over a few positions reads the weights once, as a pass over one does, and
reading them is what a single row waits for. A wrong guess is dropped, so the tokens are those that would be
chosen without guesses, up to float rounding.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ppfleetx.generation.search import Choose, OnToken, Row, Rules, process
from ppfleetx.generation.session import DecodingSession

_LENGTHS = (3, 2)
"""Tokens at the end that are looked for, the longest first: a single one says too little."""


def decode_with_lookup(
    session: DecodingSession,
    choose: Choose,
    rules: Rules,
    max_new_tokens: int,
    most_guesses: int,
    *,
    on_token: OnToken | None = None,
) -> Row:
    """Extend the single row of the session until it ends.

    Args:
        session: one prompt, with a cache.
        choose, rules, on_token: as of :func:`~ppfleetx.generation.search.decode`.
        max_new_tokens: at least 1.
        most_guesses: at most so many tokens are guessed for one pass.
    """
    row, limits, number = Row(max_new_tokens), np.array([max_new_tokens]), np.zeros(1, dtype=np.int64)
    guesses, width = np.zeros(0, dtype=np.int64), 1
    logits = session.next_logits()
    while True:
        right = 0
        while True:
            step = len(row.ids)
            scores = process(logits[right : right + 1], session.history, step, limits, rules)
            token = int(choose(scores, number, step).item())
            told_to_stop = on_token is not None and on_token(0, token)
            if not row.add(token, is_last=token == rules.end_id or told_to_stop):
                return row
            session.append(np.array([token]))
            if right == len(guesses) or guesses[right] != token:
                break
            right += 1
        if len(guesses):
            width = min(most_guesses, 2 * width if right == len(guesses) else max(1, right))
        guesses = guess(session.history[0], min(width, max_new_tokens - len(row.ids) - 1))
        logits = session.logits_with_guesses(guesses)


def guess(history: np.ndarray, count: int) -> np.ndarray:
    """Up to ``count`` tokens that may follow ``history [n]``: what followed where its end stood last.

    An end that follows itself at once is taken for the beginning of a cycle. Empty when the end is new.
    """
    for length in _LENGTHS:
        if count < 1 or len(history) <= length:
            continue
        places = np.flatnonzero((sliding_window_view(history[:-1], length) == history[-length:]).all(axis=1))
        if len(places):
            return np.resize(history[places[-1] + length :], count)
    return history[:0]
