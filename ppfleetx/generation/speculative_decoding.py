"""Speculative decoding for greedy search. Draft tokens come from a smaller assistant model, or from earlier
tokens of the sequence (prompt lookup decoding, Saxena, 2023). One forward pass of the model verifies
several draft tokens. The result equals greedy search, up to float rounding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle
from numpy.lib.stride_tricks import sliding_window_view

from ppfleetx.config.errors import ConfigError
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.generation.continuous_batching import ContinuousBatch
from ppfleetx.generation.decode_loop import OnToken, Row, Rules, process
from ppfleetx.generation.decoding_session import NextTokenModel
from ppfleetx.generation.text_io import NoTokenizer
from ppfleetx.resilience.progress import GENERATING, PROGRESS


class Assistant:
    """A small draft model for speculative decoding, which proposes tokens by greedy search. ``max_positions``
    is the longest sequence it can process."""

    def __init__(self, model: NextTokenModel, max_positions: int, tokenizer: Tokenizer | NoTokenizer) -> None:
        self.model, self.max_positions, self._tokenizer = model, max_positions, tokenizer

    def check(self, tokenizer: Tokenizer | NoTokenizer, place: str) -> None:
        """Raise ConfigError unless the assistant's tokenizer gives the same ids as ``tokenizer``, the
        tokenizer of the main model. ``place`` is where the assistant was loaded from, for the message."""
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
    """The batch of sequences for which an assistant model proposes tokens, with its own key/value cache."""

    def __init__(self, assistant: Assistant) -> None:
        self._assistant, self._batch = assistant, ContinuousBatch(assistant.model)

    def propose(self, rows: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        """Return up to ``counts[i]`` draft tokens for each sequence ``rows[i]``. All get fewer if the longest
        sequence would exceed the assistant model's ``max_positions``. In later calls, ``rows`` must be the
        same sequences in the same order, extended by their accepted tokens. :meth:`select` removes
        sequences."""
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
"""The fixed cost of a pass, mostly reading weights, in units of the cost of one position. Measured with 12
layers of hidden size 768: 93 ms for 8 positions, and 3 ms for each additional position."""
_TRUST = 0.75
"""The assumed acceptance rate of draft tokens, which decides how many to verify."""
MOST_ROWS = 3
"""The maximum number of rows for which prompt lookup is used. Measured speedups: 1.8 for two rows, 1.1 for
three, 0.95 for four, 0.7 for eight."""
LENGTHS = (3, 2)
"""The n-gram sizes to look up, largest first. Single tokens are too ambiguous."""


def decode_with_drafts(
    model: NextTokenModel,
    prompts: Sequence[Sequence[int]],
    rules: Rules,
    max_new_tokens: Sequence[int],
    max_drafts: int,
    *,
    assistant: ProposedRows | None = None,
    on_token: OnToken | None = None,
) -> list[Row]:
    """Generate tokens for each prompt by greedy search with speculative decoding. Draft tokens come from
    ``assistant`` or, if that is None, from earlier tokens of the sequence. ``max_drafts`` limits the draft
    tokens of a sequence in one forward pass."""
    batch = ContinuousBatch(model)
    batch.join(prompts, [1] * len(prompts))
    rows = [
        _DraftedRow(number, prompt, Row(limit), max_drafts)
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
            drafts = [look_up(np.array(row.history), row.width).tolist() for row in rows]
            limit = best_draft_limit([len(own) for own in drafts])
        else:
            drafts = assistant.propose([row.history for row in rows], [row.width for row in rows])
            limit = max(len(own) for own in drafts)
        for row, own in zip(rows, drafts, strict=True):
            row.drafts = own[: min(limit, batch.max_drafts)]
        logits = batch.logits_with_drafts([row.drafts for row in rows])


class _DraftedRow:
    """A sequence during speculative decoding, with its draft tokens. While all draft tokens are accepted,
    the number per pass grows; otherwise it shrinks (:func:`next_width`)."""

    def __init__(self, number: int, prompt: Sequence[int], result: Row, max_drafts: int) -> None:
        self.result, self._number, self.history = result, number, list(prompt)
        self._most, self._width = max_drafts, 1
        self.drafts: list[int] = []

    def take(
        self, logits: paddle.Tensor, likeliest: np.ndarray, i: int, rules: Rules, on_token: OnToken | None
    ) -> list[int]:
        """Append the new tokens of a pass to this sequence, and return them. They are the accepted draft
        tokens, then the next token that the model chooses.

        Args:
            logits: ``[1 + s, b, V]``. Index 0 has the logits after each row's last token, and index k those
                after its k-th draft token.
            likeliest: the argmax of ``logits``, ``[1 + s, b]``.
            i: the row of this sequence in the batch.
        """
        new: list[int] = []
        while True:
            place = len(new)
            if rules.can_change_logits(len(self.result.ids), self.result.max_new_tokens):
                token = self._choose(logits[place, i : i + 1], rules)
            else:
                token = int(likeliest[place, i])
            is_stopped = on_token is not None and on_token(self._number, token)
            goes_on = self.result.add(token, is_last=token in rules.end_ids or is_stopped)
            new.append(token)
            self.history.append(token)
            if not goes_on or new != self.drafts[: len(new)]:
                break
        if self.drafts:
            right = len(new) - 1
            self._width = next_width(self._width, right, self._most, right == len(self.drafts))
        return new

    @property
    def width(self) -> int:
        """The number of tokens to draft for the next pass."""
        return min(self._width, self.result.max_new_tokens - len(self.result.ids) - 1)

    def _choose(self, logits: paddle.Tensor, rules: Rules) -> int:
        limits = np.array([self.result.max_new_tokens])
        return int(process(logits, lambda: [self.history], len(self.result.ids), limits, rules).argmax())


def next_width(width: int, right: int, most: int, all_right: bool) -> int:
    """Return the number of tokens to draft in the next pass. If all draft tokens of the last pass were
    accepted (``all_right``), the number doubles, up to ``most``. Otherwise it becomes ``right``, but at least
    1.

    Args:
        width: the number of tokens to draft in the last pass.
        right: the number of draft tokens that the last pass accepted.
    """
    # ppfleetx.deploy.static.sampling.next_width computes the same for tensors.
    return min(most, 2 * width if all_right else max(1, right))


def best_draft_limit(counts: Sequence[int]) -> int:
    """Return the limit of draft tokens per sequence for which the expected throughput of the next pass is
    highest. ``counts`` has the number of draft tokens found for each sequence."""

    def rate(most: int) -> float:
        # A pass computes the same number of positions for every sequence.
        tokens = len(counts) + _TRUST * sum(min(count, most) for count in counts)
        return tokens / (_WEIGHTS + len(counts) * (1 + most))

    return max(range(max(counts) + 1), key=rate)


def look_up(history: np.ndarray, count: int) -> np.ndarray:
    """Return ``count`` draft tokens for a sequence with the token ids ``history``: the tokens that followed
    an earlier occurrence of its last tokens. Returns an empty array if there is no such occurrence."""
    for length in LENGTHS:
        if count < 1 or len(history) <= length:
            continue
        places = np.flatnonzero((sliding_window_view(history[:-1], length) == history[-length:]).all(axis=1))
        if len(places):
            return np.resize(history[places[-1] + length :], count)  # repeats them if there are too few
    return history[:0]
