"""Prompt lookup decoding (Saxena, 2023): guess tokens from the row's own text and verify them in one pass.

Text repeats itself: the tokens that followed an earlier occurrence of the last tokens often follow again. A
pass over a few positions reads the weights once, just like a pass over one position, and with few rows
reading them takes most of the time. Wrong guesses are dropped, so the tokens are the same as in greedy
search, up to float rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle
from numpy.lib.stride_tricks import sliding_window_view

from ppfleetx.config.errors import ConfigError
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.generation.continuous import ContinuousBatch
from ppfleetx.generation.search import OnToken, Row, Rules, process
from ppfleetx.generation.session import NextTokenModel
from ppfleetx.generation.text import NoTokenizer
from ppfleetx.resilience.heartbeat import GENERATING, PROGRESS


class Assistant:
    """A model that proposes the next tokens of another model's rows, by greedy search. Rows longer than
    ``max_positions`` get no proposals."""

    def __init__(self, model: NextTokenModel, max_positions: int, tokenizer: Tokenizer | NoTokenizer) -> None:
        self.model, self.max_positions, self._tokenizer = model, max_positions, tokenizer

    def check(self, tokenizer: Tokenizer | NoTokenizer, place: str) -> None:
        """Raise ConfigError unless the model to assist has the same tokens."""
        if isinstance(tokenizer, NoTokenizer) or isinstance(self._tokenizer, NoTokenizer):
            raise ConfigError(
                "both models need a tokenizer: their token ids must mean the same",
                key="Generation.assistant_model",
                value=place,
            )
        if tokenizer.fingerprint != self._tokenizer.fingerprint:
            raise ConfigError(
                f"its tokenizer {self._tokenizer.place} is not the model's, {tokenizer.place}; an assistant "
                "must have the same tokens",
                key="Generation.assistant_model",
                value=place,
            )


class ProposedRows:
    """Rows for which an assistant proposes tokens, with the assistant's cache of these rows."""

    def __init__(self, assistant: Assistant) -> None:
        self._assistant, self._batch = assistant, ContinuousBatch(assistant.model)

    def propose(self, rows: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        """Propose up to ``counts[i]`` tokens after ``rows[i]``.

        ``rows`` continue the rows of the previous call, in the same order, with wrong proposals removed.
        """
        longest = max(len(row) for row in rows)
        most = min(max(counts), self._assistant.max_positions - longest)
        if most < 1:
            return [[] for _ in rows]
        proposals: list[list[int]] = [[] for _ in rows]
        logits = self._batch.logits_after(rows)
        while True:
            tokens = np.asarray(logits.argmax(-1))
            for proposed, token in zip(proposals, tokens.tolist(), strict=True):
                proposed.append(token)
            if len(proposals[0]) == most:
                return [proposed[:count] for proposed, count in zip(proposals, counts, strict=True)]
            self._batch.append([[token] for token in tokens.tolist()])
            logits = self._batch.next_logits()

    def select(self, rows: Sequence[int]) -> None:
        if self._batch.num_rows:
            self._batch.select(rows)


_WEIGHTS = 32
"""The fixed cost of a pass (mostly reading weights), in positions that take as long to compute. Measured with
12 layers of 768: 93 ms for 8 positions, and 3 ms for each further one."""
_TRUST = 0.75
"""The share of guesses that is assumed to be right for the decision how many are worthwhile."""
MOST_ROWS = 3
"""The most rows for which guessing pays. With more, a pass is limited by arithmetic and by the row with the
worst guesses. Guessing is 1.8 times as fast for two rows, 1.1 for three, 0.95 for four and 0.7 for eight."""
LENGTHS = (3, 2)
"""The numbers of last tokens to look up, largest first. A single token says too little."""


def decode_with_lookup(
    model: NextTokenModel,
    prompts: Sequence[Sequence[int]],
    rules: Rules,
    max_new_tokens: Sequence[int],
    most_guesses: int,
    *,
    assistant: ProposedRows | None = None,
    on_token: OnToken | None = None,
) -> list[Row]:
    """Extend each prompt by greedy search, like :func:`~ppfleetx.generation.search.decode`, with at most
    ``most_guesses`` for a row in one pass, from an assistant or the row's own text."""
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
            if assistant is not None:
                assistant.select(going_on)
        if assistant is None:
            count = worthwhile([row.guess() for row in rows])
        else:
            guesses = assistant.propose([row.history for row in rows], [row.width for row in rows])
            count = max(row.hold(own) for row, own in zip(rows, guesses, strict=True))
        count = min(count, batch.most_guesses)
        logits = batch.logits_with_guesses([row.first_guesses(count) for row in rows])


class _GuessedRow:
    """A row and the guesses for its next tokens. Good guesses lead to more guesses."""

    def __init__(self, number: int, prompt: Sequence[int], result: Row, most_guesses: int) -> None:
        self.result, self._number, self.history = result, number, list(prompt)
        self._most, self._width, self._guesses = most_guesses, 1, []

    def take(
        self, logits: paddle.Tensor, likeliest: np.ndarray, i: int, rules: Rules, on_token: OnToken | None
    ) -> list[int]:
        """Take the row's new tokens: the correct guesses, and the token after them. Row ``i`` of the batch
        has ``logits [1 + s, b, V]`` after its last token and after each guess."""
        new: list[int] = []
        while True:
            place = len(new)
            if rules.change(len(self.result.ids), self.result.max_new_tokens):
                token = self._choose(logits[place, i : i + 1], rules)
            else:
                token = int(likeliest[place, i])
            is_stopped = on_token is not None and on_token(self._number, token)
            goes_on = self.result.add(token, is_last=token in rules.end_ids or is_stopped)
            new.append(token)
            self.history.append(token)
            if not goes_on or new != self._guesses[: len(new)]:
                break
        if self._guesses:
            right = len(new) - 1
            self._width = next_width(self._width, right, self._most, right == len(self._guesses))
        return new

    @property
    def width(self) -> int:
        return min(self._width, self.result.max_new_tokens - len(self.result.ids) - 1)

    def guess(self) -> int:
        """Guess the next tokens from the row's own text. Returns their number."""
        return self.hold(guess(np.array(self.history), self.width).tolist())

    def hold(self, guesses: list[int]) -> int:
        """Keep guesses until the next pass has checked them. Returns their number."""
        self._guesses = guesses
        return len(guesses)

    def first_guesses(self, count: int) -> list[int]:
        self._guesses = self._guesses[:count]
        return self._guesses

    def _choose(self, logits: paddle.Tensor, rules: Rules) -> int:
        limits = np.array([self.result.max_new_tokens])
        return int(process(logits, lambda: [self.history], len(self.result.ids), limits, rules).argmax())


def next_width(width: int, right: int, most: int, all_right: bool) -> int:
    """Choose how many tokens to guess next, after ``right`` of at most ``width`` guesses were right.

    :func:`ppfleetx.deploy.static.token_choice.next_width` does the same for tensors.
    """
    return min(most, 2 * width if all_right else max(1, right))


def worthwhile(counts: Sequence[int]) -> int:
    """How many guesses to verify per row, given ``counts [b]`` guesses, to get the most tokens per second.

    In a pass all rows have the same number of positions, even if they have fewer guesses.
    """

    def rate(most: int) -> float:
        tokens = len(counts) + _TRUST * sum(min(count, most) for count in counts)
        return tokens / (_WEIGHTS + len(counts) * (1 + most))

    return max(range(max(counts) + 1), key=rate)


def guess(history: np.ndarray, count: int) -> np.ndarray:
    """Guess up to ``count`` tokens after ``history [n]``: the tokens after the last occurrence of its end.

    If fewer than ``count`` tokens follow that occurrence, they are repeated. There are no guesses if the end
    has not occurred before.
    """
    for length in LENGTHS:
        if count < 1 or len(history) <= length:
            continue
        places = np.flatnonzero((sliding_window_view(history[:-1], length) == history[-length:]).all(axis=1))
        if len(places):
            return np.resize(history[places[-1] + length :], count)
    return history[:0]
