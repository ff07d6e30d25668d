"""Beam search, plain and diverse (Vijayakumar et al., 2018), as in Hugging Face transformers 5. Results are
ranked by log-probability / length ** length_penalty.

Shape letters: b prompts, N beams per group, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import paddle

from ppfleetx.generation.decode_loop import Row, Rules, process
from ppfleetx.generation.decoding_session import DecodingSession
from ppfleetx.generation.logits_processors import largest, log_probabilities
from ppfleetx.resilience.progress import GENERATING, PROGRESS

# The initial score of every beam of a group but the first. All beams start as copies of the prompt. With
# equal scores, all would be extended in the same way.
_COPY = -1e9


@dataclass(frozen=True)
class BeamOptions:
    """Options of beam search.

    Attributes:
        num_beams: number of beams per prompt, over all groups; a multiple of ``num_groups``.
        length_penalty: log-probabilities are divided by length ** length_penalty; values above 0 favor long
            results.
        early_stopping: when to stop a group once it has as many results as beams. True: immediately. False:
            when no active beam, if it ended now, would score better than the worst result. "never": when no
            active beam can still score better than the worst result, however long it grows.
        num_groups: number of beam groups per prompt (diverse beam search); 1 is plain beam search.
        diversity_rate: how much a token's score drops for each beam of an earlier group that took the same
            token in the same step.
    """

    num_beams: int
    length_penalty: float = 0.0
    early_stopping: bool | Literal["never"] = False
    num_groups: int = 1
    diversity_rate: float = 0.0

    @property
    def group_size(self) -> int:
        return self.num_beams // self.num_groups


def beam_search(
    session: DecodingSession,
    rules: Rules,
    max_new_tokens: Sequence[int],
    options: BeamOptions,
    num_results: int = 1,
) -> list[Row]:
    """Return the ``num_results`` best continuations of each prompt of ``session`` in one list: the first
    prompt's, best first, then the second prompt's, and so on. ``rules`` are applied to log-probabilities, not
    to logits. ``max_new_tokens`` has one limit per prompt, at least 1. ``num_results`` is at most
    ``options.num_beams``."""
    assert 1 <= num_results <= options.num_beams
    assert options.num_beams % options.num_groups == 0
    logits = session.next_logits()
    copied = np.repeat(np.arange(session.num_rows), options.num_beams)
    session.select(copied)
    logits = logits.index_select(paddle.to_tensor(copied), axis=0)
    groups = [
        _Group(prompt, number, limit, options, rules.end_ids)
        for prompt, limit in enumerate(max_new_tokens)
        for number in range(options.num_groups)
    ]
    active, step = groups, 0
    while True:
        PROGRESS.beat(GENERATING)
        moves = _take_step(active, log_probabilities(logits), session.rows(), step, rules)
        going_on = [place for place, group in enumerate(active) if group.is_open]
        if not going_on:
            return _results(groups, num_results)
        sources = [place * options.group_size + beam for place in going_on for beam in moves[place][0]]
        session.select(np.array(sources))
        session.append(np.array([token for place in going_on for token in moves[place][1]]))
        active, step = [active[place] for place in going_on], step + 1
        logits = session.next_logits()


_Move = tuple[list[int], list[int]]
"""A step of one group: (the indices of the beams to extend, the new token of each). After the group's last
step, only the diversity penalty of later groups uses the tokens."""


def _take_step(
    active: Sequence[_Group],
    log_probs: paddle.Tensor,
    history: Sequence[np.ndarray],
    step: int,
    rules: Rules,
) -> list[_Move]:
    """Advance all unfinished groups of beams by one token. Returns, for each group, the indices of the beams
    to extend and the new token of each.

    Args:
        log_probs: ``[groups * N, V]`` log-probabilities of each beam's next token; a group has N beams.
        history: the tokens of each beam so far, prompt included.
        step: number of tokens generated so far.
    """
    options = active[0].options
    moves: list[_Move] = [([], [])] * len(active)
    taken: dict[int, list[int]] = {group.prompt: [] for group in active}
    # Diversity penalty: a token scores less in a group if earlier groups of the prompt took it in this step.
    # As in transformers 5 (unlike 4), finished groups do not count, and the reduced scores accumulate.
    for number in range(options.num_groups):
        places = [place for place, group in enumerate(active) if group.number == number]
        if not places:
            continue
        members = [active[place] for place in places]
        rows = (np.array(places)[:, None] * options.group_size + np.arange(options.group_size)).reshape(-1)
        scores = log_probs if len(rows) == len(history) else log_probs.index_select(paddle.to_tensor(rows))
        if number:
            scores = scores - _penalty([taken[group.prompt] for group in members], scores.shape[-1], options)
        limits = np.repeat([group.max_new_tokens for group in members], options.group_size)
        scores = process(scores, lambda rows=rows: [history[row] for row in rows], step, limits, rules)
        for place, group, best in zip(places, members, _best(scores, members), strict=True):
            moves[place] = group.advance(best)
            taken[group.prompt] += moves[place][1]
    return moves


def _penalty(taken: Sequence[Sequence[int]], vocab: int, options: BeamOptions) -> paddle.Tensor:
    counts = np.stack([np.bincount(tokens, minlength=vocab) for tokens in taken])
    penalty = (options.diversity_rate * counts).astype(np.float32)
    return paddle.to_tensor(np.repeat(penalty, options.group_size, axis=0))


def _best(scores: paddle.Tensor, groups: Sequence[_Group]) -> list[list[tuple[float, int, int]]]:
    """Return the best candidates of each group, best first, as (total score, beam, token). The total score is
    the token's score in ``scores [groups * N, V]`` plus the score of its beam."""
    vocab = scores.shape[-1]
    size, looked_at = groups[0].options.group_size, max(2, 1 + len(groups[0].end_ids))
    so_far = paddle.to_tensor(np.concatenate([group.scores for group in groups]))
    total = (scores + so_far.unsqueeze(-1)).reshape([len(groups), -1])
    values, places = largest(total, min(looked_at * size, size * vocab))
    beams, tokens = np.divmod(places.numpy(), vocab)
    columns = zip(values.numpy().tolist(), beams.tolist(), tokens.tolist(), strict=True)
    return [list(zip(*each, strict=True)) for each in columns]


def _results(groups: Sequence[_Group], count: int) -> list[Row]:
    found: dict[int, list[tuple[float, Row]]] = {}
    for group in groups:
        found.setdefault(group.prompt, []).extend(group.finished)
    ranked = [sorted(results, key=lambda result: -result[0]) for results in found.values()]
    return [row for results in ranked for _, row in results[:count]]


@dataclass
class _Group:
    """One group of beams of one prompt. ``ids`` and ``scores [N]`` are the new tokens and the scores of the N
    active beams. ``finished`` has the results so far, as (rank score, sequence)."""

    prompt: int
    number: int
    max_new_tokens: int
    options: BeamOptions
    end_ids: tuple[int, ...]
    scores: np.ndarray = field(init=False)
    ids: list[list[int]] = field(init=False)
    finished: list[tuple[float, Row]] = field(default_factory=list)
    is_open: bool = True

    def __post_init__(self) -> None:
        self.scores = np.full(self.options.group_size, _COPY, dtype=np.float32)
        self.scores[0] = 0.0
        self.ids = [[] for _ in range(self.options.group_size)]

    def advance(self, best: Sequence[tuple[float, int, int]]) -> _Move:
        size, length = self.options.group_size, len(self.ids[0]) + 1
        is_last = length == self.max_new_tokens
        kept: list[tuple[float, int, int]] = []
        # Only the N best candidates can become results. The N best that do not end become the next beams.
        for rank, (score, beam, token) in enumerate(best):
            if (is_last or token in self.end_ids) and rank < size:
                self._finish(score, [*self.ids[beam], token])
            if token not in self.end_ids and len(kept) < size:
                kept.append((score, beam, token))
        self.ids = [[*self.ids[beam], token] for _, beam, token in kept]
        self.scores = np.array([score for score, _, _ in kept], dtype=np.float32)
        self.finished.sort(key=lambda result: -result[0])
        del self.finished[size:]
        self.is_open = bool(kept) and not is_last and self._can_improve(length)
        return [beam for _, beam, _ in kept], [token for _, _, token in kept]

    def _finish(self, score: float, ids: list[int]) -> None:
        reason = "stop" if ids[-1] in self.end_ids else "length"
        ranked = score / len(ids) ** self.options.length_penalty
        self.finished.append((ranked, Row(self.max_new_tokens, ids, reason, rank_score=ranked)))

    def _can_improve(self, length: int) -> bool:
        options = self.options
        if len(self.finished) < options.group_size:
            return True
        if options.early_stopping is True:
            return False
        if options.early_stopping == "never" and options.length_penalty > 0:
            length = self.max_new_tokens  # scores are negative, so the largest divisor gives the best
        return self.scores[0] / length**options.length_penalty > self.finished[-1][0]
