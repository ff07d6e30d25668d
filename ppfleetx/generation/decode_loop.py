"""The decoding loop of greedy search and sampling. Beam search has its own.

Shape letters: b sequences of the batch, V vocabulary size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import paddle

from ppfleetx.generation.decoding_session import DecodingSession
from ppfleetx.generation.gumbel_sampling import RandomStream
from ppfleetx.generation.logits_processors import force
from ppfleetx.generation.sampling import TokenScore, score_tokens
from ppfleetx.generation.sampling_params import PLAIN, RowTokens, SamplingParams, chosen, process_logits
from ppfleetx.resilience.progress import GENERATING, PROGRESS

FinishReason = Literal["stop", "length"]
OnToken = Callable[[int, int], bool]
"""Callback for new tokens: (row index, token id) -> whether to end the row after this token."""


@dataclass(frozen=True)
class Rules:
    """The rules that change logits before a token is chosen, and the tokens that end a sequence
    (``end_ids``).

    Attributes:
        min_new_tokens: number of new tokens that a sequence must have before an end token is allowed.
        options: the options of the logit processors, such as the repetition penalty.
        forced_bos_id: the first new token; None: any token.
        forced_eos_id: the last token of a sequence that reaches its length limit; None: any token.
    """

    end_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    options: SamplingParams = PLAIN
    forced_bos_id: int | None = None
    forced_eos_id: int | None = None

    def can_change_logits(self, num_new: int, limit: int) -> bool:
        """Return whether these rules can change the logits for the next token of a sequence. ``num_new`` is
        the number of new tokens that the sequence has so far, and ``limit`` is their maximum number."""
        return (
            self.options.change_logits
            or (bool(self.end_ids) and num_new < self.min_new_tokens)
            or (self.forced_bos_id is not None and num_new == 0)
            or (self.forced_eos_id is not None and num_new + 1 == limit)
        )


@dataclass
class Row:
    """One generated sequence: its new tokens, including the end token, and the reason why it ended.
    ``rank_score`` is the score by which beam search ranks its results.
    """

    max_new_tokens: int
    ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    scores: list[TokenScore] = field(default_factory=list)
    rank_score: float | None = None

    def add(self, token_id: int, *, is_last: bool) -> bool:
        """Append a token. Returns whether the sequence continues after it."""
        self.ids.append(token_id)
        if is_last:
            self.finish_reason = "stop"
        elif len(self.ids) == self.max_new_tokens:
            self.finish_reason = "length"
        return self.finish_reason is None


def decode(
    session: DecodingSession,
    rules: Rules,
    max_new_tokens: Sequence[int],
    *,
    streams: Sequence[RandomStream] = (),
    copies: int = 1,
    on_token: OnToken | None = None,
    num_top: int | None = None,
) -> list[Row]:
    """Generate tokens for every prompt of a session until all sequences have ended. Returns the sequences of
    the first prompt, then those of the second, and so on.

    Args:
        session: holds the prompts; sequences that end are removed from it.
        max_new_tokens: the limit of new tokens of each prompt, at least 1.
        streams: the random numbers of each sequence, for sampling. If empty, the likeliest tokens are chosen.
        copies: number of continuations per prompt.
        on_token: callback for each new token; returns whether the sequence ends after this token.
        num_top: number of alternatives to list with each token's log-probability. None: no log-probabilities.
    """
    logits = session.next_logits()
    if copies > 1:
        repeated = np.repeat(np.arange(session.num_rows), copies)
        session.select(repeated)
        logits = logits.index_select(paddle.to_tensor(repeated), axis=0)
    rows = [Row(limit) for limit in max_new_tokens for _ in range(copies)]
    limits = np.array([row.max_new_tokens for row in rows])
    active = np.arange(len(rows))
    for step in itertools.count():
        PROGRESS.beat(GENERATING)
        processed_logits = process(logits, session.rows, step, limits[active], rules)
        if streams:
            numbers = np.concatenate([streams[row].numbers(step) for row in active])
            tokens = chosen(processed_logits, rules.options, numbers).numpy()
        else:
            tokens = processed_logits.argmax(-1).numpy()
        if num_top is not None:
            for row, score in zip(
                active.tolist(), score_tokens(logits, tokens.tolist(), num_top), strict=True
            ):
                rows[row].scores.append(score)
        going_on = []
        for place, (row, token) in enumerate(zip(active.tolist(), tokens.tolist(), strict=True)):
            is_stopped = on_token is not None and on_token(row, token)
            if rows[row].add(token, is_last=token in rules.end_ids or is_stopped):
                going_on.append(place)
        if not going_on:
            return rows
        session.append(tokens)
        if len(going_on) < len(active):
            session.select(np.array(going_on))
            active = active[going_on]
        logits = session.next_logits()
    raise AssertionError("unreachable: every row has a limit")


def process(
    logits: paddle.Tensor,
    tokens: Callable[[], Sequence[Sequence[int] | np.ndarray]],
    num_new: int,
    limits: np.ndarray,
    rules: Rules,
) -> paddle.Tensor:
    """Apply ``rules`` to the logits, or log-probabilities, ``[b, V]``. ``num_new`` is the number of new
    tokens that each row has so far, and ``limits [b]`` are the maximum numbers of new tokens. ``tokens()``
    returns the token ids of each row, prompt included."""
    early_ends = rules.end_ids if num_new < rules.min_new_tokens else ()
    if rules.options.change_logits or early_ends:
        logits = process_logits(
            logits, rules.options, [RowTokens(ids, num_new) for ids in tokens()], early_ends
        )
    if rules.forced_bos_id is not None and num_new == 0:
        logits = force(logits, rules.forced_bos_id, paddle.ones([logits.shape[0]], dtype="bool"))
    if rules.forced_eos_id is not None:
        is_last = limits == num_new + 1
        if is_last.any():
            logits = force(logits, rules.forced_eos_id, paddle.to_tensor(is_last))
    return logits
