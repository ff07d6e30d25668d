"""Several tokens a step: guesses from a row's own text, checked by the model in one pass.

Text repeats itself: what followed the last tokens where they stood before often follows again (Saxena, 2023,
"Prompt lookup decoding"). A pass over a few positions reads the weights once, as a pass over one does, and
reading them is what few rows wait for. A wrong guess is dropped, so the tokens are those of greedy search
without guesses, up to float rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle
from numpy.lib.stride_tricks import sliding_window_view

from ppfleetx.generation.continuous import ContinuousBatch
from ppfleetx.generation.search import OnToken, Row, Rules, process
from ppfleetx.generation.session import NextTokenModel
from ppfleetx.resilience.activity import GENERATING, PROGRESS

_WEIGHTS = 32
"""Positions whose arithmetic takes as long as what a pass takes anyway, most of it for reading the weights:
measured, 12 layers of 768, 93 ms for 8 positions and 3 ms for each one more."""
_TRUST = 0.75
"""Share of guesses that are taken to be right when it is decided how many are worth while."""
MOST_ROWS = 3
"""Of a batch that is guessed for. With more rows a pass waits for arithmetic, and for the row that is guessed
worst. Guesses make 1.8 times the tokens of two rows, 1.1 of three, 0.95 of four and 0.7 of eight."""
LENGTHS = (3, 2)
"""Tokens at the end that are looked for, the longest first: a single one says too little."""


def decode_with_lookup(
    model: NextTokenModel,
    prompts: Sequence[Sequence[int]],
    rules: Rules,
    max_new_tokens: Sequence[int],
    most_guesses: int,
    *,
    on_token: OnToken | None = None,
) -> list[Row]:
    """Extend each prompt by its likeliest tokens, as :func:`~ppfleetx.generation.search.decode` does.

    Args:
        model: gives the logits.
        prompts: token ids, none of them empty.
        rules, max_new_tokens, on_token: as in ``decode``.
        most_guesses: the most tokens that are guessed for a row in one pass.
    """
    batch = ContinuousBatch(model)
    batch.join(prompts, [1] * len(prompts))
    rows = [
        _GuessedRow(number, prompt, Row(limit), most_guesses)
        for number, (prompt, limit) in enumerate(zip(prompts, max_new_tokens, strict=True))
    ]
    results = [row.result for row in rows]
    logits = batch.next_logits().unsqueeze(0)
    while True:
        PROGRESS.beat(GENERATING)
        likeliest = logits.argmax(-1).numpy()
        new = [row.take(logits, likeliest, i, rules, on_token) for i, row in enumerate(rows)]
        going_on = [i for i, row in enumerate(rows) if row.result.finish_reason is None]
        if not going_on:
            return results
        batch.append(new)
        if len(going_on) < len(rows):
            batch.select(going_on)
            rows = [rows[i] for i in going_on]
        count = worthwhile([row.guess() for row in rows])
        logits = batch.logits_with_guesses([row.first_guesses(count) for row in rows])


class _GuessedRow:
    """A row, and what is guessed of it: more, the more of it has been right."""

    def __init__(self, number: int, prompt: Sequence[int], result: Row, most_guesses: int) -> None:
        self.result, self._number, self._history = result, number, list(prompt)
        self._most, self._width, self._guesses = most_guesses, 1, []

    def take(
        self, logits: paddle.Tensor, likeliest: np.ndarray, i: int, rules: Rules, on_token: OnToken | None
    ) -> list[int]:
        """The row's new tokens: the guesses that are right, and the one after them.

        Args:
            logits: ``[1 + s, b, V]`` after the last token of each row of the batch, and after each guess.
            likeliest: ``[1 + s, b]`` ids of their largest.
            i: place of this row in the batch.
            rules, on_token: as in :func:`decode_with_lookup`.
        """
        new: list[int] = []
        while True:
            place = len(new)
            if rules.change(len(self.result.ids), self.result.max_new_tokens):
                token = self._choose(logits[place, i : i + 1], rules)
            else:
                token = int(likeliest[place, i])
            told_to_stop = on_token is not None and on_token(self._number, token)
            goes_on = self.result.add(token, is_last=token in rules.end_ids or told_to_stop)
            new.append(token)
            self._history.append(token)
            if not goes_on or new != self._guesses[: len(new)]:
                break
        self._learn(len(new) - 1)
        return new

    def guess(self) -> int:
        """Guess what may come next; how many tokens."""
        left = self.result.max_new_tokens - len(self.result.ids) - 1
        self._guesses = guess(np.array(self._history), min(self._width, left)).tolist()
        return len(self._guesses)

    def first_guesses(self, count: int) -> list[int]:
        """Keep the first ``count`` guesses, and give them."""
        self._guesses = self._guesses[:count]
        return self._guesses

    def _choose(self, logits: paddle.Tensor, rules: Rules) -> int:
        """The likeliest token of ``logits [1, V]`` when they have been treated by the rules."""
        history, limits = np.array([self._history]), np.array([self.result.max_new_tokens])
        return int(process(logits, history, len(self.result.ids), limits, rules).argmax())

    def _learn(self, right: int) -> None:
        if self._guesses:
            self._width = next_width(self._width, right, self._most, right == len(self._guesses))


def next_width(width: int, right: int, most: int, all_right: bool) -> int:
    """Tokens to guess next when ``width`` was allowed and ``right`` were right: more, the more were.

    :func:`ppfleetx.deploy.static.token_choice.next_width` is the same of tensors.
    """
    return min(most, 2 * width if all_right else max(1, right))


def worthwhile(counts: Sequence[int]) -> int:
    """How many guesses to check of each row when there are ``counts [b]`` of them: most tokens for the time.

    All rows take part in a pass with as many positions, whether they have as many guesses or not.
    """

    def rate(most: int) -> float:
        tokens = len(counts) + _TRUST * sum(min(count, most) for count in counts)
        return tokens / (_WEIGHTS + len(counts) * (1 + most))

    return max(range(max(counts) + 1), key=rate)


def guess(history: np.ndarray, count: int) -> np.ndarray:
    """Up to ``count`` tokens that may follow ``history [n]``: what followed where its end stood last.

    An end that follows itself at once is taken for the beginning of a cycle. Empty when the end is new.
    """
    for length in LENGTHS:
        if count < 1 or len(history) <= length:
            continue
        places = np.flatnonzero((sliding_window_view(history[:-1], length) == history[-length:]).all(axis=1))
        if len(places):
            return np.resize(history[places[-1] + length :], count)
    return history[:0]
