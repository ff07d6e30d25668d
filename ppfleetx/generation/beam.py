"""Beam search.

The rules are those of Hugging Face transformers 5: of each prompt's continuations the 2N likeliest are
looked at (N beams); those that end and are among the first N are results, the first N that do not end go
on. Results are ranked by log-probability / length ** length_penalty.

Shape letters: b prompts, N beams of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import paddle

from ppfleetx.generation.processors import largest, log_probabilities
from ppfleetx.generation.search import Row, Rules, process
from ppfleetx.generation.session import DecodingSession

# Where a prompt's beams are still copies of each other, only the first one counts.
_COPY = -1e9


@dataclass(frozen=True)
class BeamOptions:
    """How beams compete.

    Attributes:
        num_beams: N.
        length_penalty: exponent of the length by which log-probabilities are divided; above 0 favours
            long results.
        early_stopping: stop as soon as there are N results. Otherwise, when the best beam, were it to end
            now, would not be among them.
    """

    num_beams: int
    length_penalty: float = 0.0
    early_stopping: bool = False


def beam_search(
    session: DecodingSession,
    rules: Rules,
    max_new_tokens: Sequence[int],
    options: BeamOptions,
    num_results: int = 1,
) -> list[Row]:
    """The best continuations of every prompt, ``num_results`` rows each, best first.

    Args:
        session: the prompts.
        rules: see :class:`~ppfleetx.generation.search.Rules`; applied to log-probabilities.
        max_new_tokens: of each prompt, at least 1.
        options: see :class:`BeamOptions`.
        num_results: at most N.
    """
    assert 1 <= num_results <= options.num_beams
    logits = session.next_logits()
    copied = np.repeat(np.arange(session.num_rows), options.num_beams)
    session.select(copied)
    logits = logits.index_select(paddle.to_tensor(copied), axis=0)
    prompts = [_Prompt(limit, options, rules.end_id) for limit in max_new_tokens]
    active, step = prompts, 0
    while True:
        scores = process(log_probabilities(logits), session.history, step, rules)
        going_on, sources, tokens = [], [], []
        for place, (prompt, best) in enumerate(zip(active, _best(scores, active), strict=True)):
            beams, ids = prompt.advance(best)
            if prompt.is_open:
                going_on.append(prompt)
                sources += [place * options.num_beams + beam for beam in beams]
                tokens += ids
        if not going_on:
            return [row for prompt in prompts for row in prompt.results(num_results)]
        session.select(np.array(sources))
        session.append(np.array(tokens))
        active, step = going_on, step + 1
        logits = session.next_logits()


@dataclass(frozen=True)
class _Candidates:
    """The 2N likeliest continuations of a prompt, best first."""

    scores: list[float]
    beams: list[int]
    tokens: list[int]


def _best(scores: paddle.Tensor, active: Sequence[_Prompt]) -> list[_Candidates]:
    """Of log-probabilities ``[b * N, V]`` of the next token, added to those of the beams."""
    vocab = scores.shape[-1]
    num_beams = active[0].options.num_beams
    so_far = paddle.to_tensor(np.concatenate([prompt.scores for prompt in active]))
    total = (scores + so_far.unsqueeze(-1)).reshape([len(active), -1])
    values, places = largest(total, min(2 * num_beams, num_beams * vocab))
    beams, tokens = np.divmod(places.numpy(), vocab)
    return [
        _Candidates(*columns)
        for columns in zip(values.numpy().tolist(), beams.tolist(), tokens.tolist(), strict=True)
    ]


@dataclass
class _Prompt:
    """Beams of one prompt: those under way (``scores [N]``, ``ids``) and the results so far."""

    max_new_tokens: int
    options: BeamOptions
    end_id: int | None
    scores: np.ndarray = field(init=False)
    ids: list[list[int]] = field(init=False)
    finished: list[tuple[float, Row]] = field(default_factory=list)
    is_open: bool = True

    def __post_init__(self) -> None:
        self.scores = np.full(self.options.num_beams, _COPY, dtype=np.float32)
        self.scores[0] = 0.0
        self.ids = [[] for _ in range(self.options.num_beams)]

    def advance(self, best: _Candidates) -> tuple[list[int], list[int]]:
        """Take one step; the beams that go on, as (beam they continue, its new token)."""
        length = len(self.ids[0]) + 1
        kept: list[tuple[float, int, int]] = []
        for rank, (score, beam, token) in enumerate(zip(best.scores, best.beams, best.tokens, strict=True)):
            if token == self.end_id or length == self.max_new_tokens:
                if rank < self.options.num_beams:
                    self._finish(score, [*self.ids[beam], token])
            elif len(kept) < self.options.num_beams:
                kept.append((score, beam, token))
        self.ids = [[*self.ids[beam], token] for _, beam, token in kept]
        self.scores = np.array([score for score, _, _ in kept], dtype=np.float32)
        self.finished.sort(key=lambda result: -result[0])
        del self.finished[self.options.num_beams :]
        self.is_open = bool(kept) and self._can_improve(length)
        return [beam for _, beam, _ in kept], [token for _, _, token in kept]

    def results(self, count: int) -> list[Row]:
        return [row for _, row in self.finished[:count]]

    def _finish(self, score: float, ids: list[int]) -> None:
        reason = "stop" if ids[-1] == self.end_id else "length"
        ranked = score / len(ids) ** self.options.length_penalty
        self.finished.append((ranked, Row(self.max_new_tokens, ids, reason)))

    def _can_improve(self, length: int) -> bool:
        """Whether a beam might still become one of the results."""
        if len(self.finished) < self.options.num_beams:
            return True
        if self.options.early_stopping:
            return False
        return self.scores[0] / length**self.options.length_penalty > self.finished[-1][0]
