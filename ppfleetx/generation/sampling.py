"""Choose the next token of each row of a batch whose rows may have different options.

Shape letters: b rows, V true vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from ppfleetx.generation.cache import GrowingCache
from ppfleetx.generation.gumbel_sampling import draw
from ppfleetx.generation.processors import (
    candidates,
    forbid,
    largest,
    log_probabilities,
    penalize_repetition,
)
from ppfleetx.generation.session import NextTokenModel, pad_left

_COLUMNS = 128  # positions of a prompt whose logits are held in memory at a time


@dataclass(frozen=True)
class RowOptions:
    """The sampling options of one row; terms are as in the ``Generation`` section.

    Attributes:
        temperature: 0 selects the likeliest token; ``top_k`` and ``top_p`` then have no effect.
        presence_penalty, frequency_penalty: subtracted from the logits of generated tokens, once or once per
            occurrence. Tokens of the prompt do not count. (As in OpenAI's API.)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def counts_tokens(self) -> bool:
        """Whether the options depend on which tokens were generated, and how often."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True)
class RowChoice:
    """The inputs for choosing one row's next token.

    Attributes:
        history: the row's tokens so far.
        exponentials: ``[n]`` numbers from the row's `RandomStream`; not needed at temperature 0.
        forbidden: ids that must not come next (the end tokens, before the minimum length).
        num_new: how many tokens at the end of the history were generated.
    """

    options: RowOptions
    history: Sequence[int]
    exponentials: np.ndarray | None = None
    forbidden: tuple[int, ...] = ()
    num_new: int = 0


def choose_tokens(logits: paddle.Tensor, choices: Sequence[RowChoice]) -> list[int]:
    """Choose one token per row of ``logits [b, V]``. Rows with equal options are processed together."""
    groups: dict[tuple[RowOptions, tuple[int, ...]], list[int]] = {}
    for row, choice in enumerate(choices):
        groups.setdefault((choice.options, choice.forbidden), []).append(row)
    tokens = [0] * len(choices)
    for (options, forbidden), rows in groups.items():
        part = logits if len(groups) == 1 else logits.index_select(paddle.to_tensor(rows), axis=0)
        if options.repetition_penalty != 1.0:
            history, _ = pad_left([choices[row].history for row in rows])
            part = penalize_repetition(part, paddle.to_tensor(history), options.repetition_penalty)
        if options.counts_tokens:
            new = [choices[row].history[len(choices[row].history) - choices[row].num_new :] for row in rows]
            part = part - paddle.to_tensor(_count_penalties(new, options, logits.shape[-1]))
        if forbidden:
            part = forbid(part, paddle.to_tensor(forbidden))
        chosen = _choose(part, options, [choices[row].exponentials for row in rows])
        for row, token in zip(rows, chosen.numpy().tolist(), strict=True):
            tokens[row] = token
    return tokens


def _choose(
    logits: paddle.Tensor, options: RowOptions, exponentials: Sequence[np.ndarray | None]
) -> paddle.Tensor:
    if options.temperature == 0.0:
        return logits.argmax(-1)
    weights = candidates(logits, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    return draw(weights, paddle.to_tensor(np.stack(exponentials)))


def _count_penalties(new: Sequence[Sequence[int]], options: RowOptions, vocab_size: int) -> np.ndarray:
    """``[b, V]`` float32: what to subtract from the logits because of each row's ``new`` tokens."""
    penalties = np.zeros((len(new), vocab_size), np.float32)
    for row, tokens in zip(penalties, new, strict=True):
        ids, counts = np.unique(np.array(tokens, np.int64), return_counts=True)
        row[ids] = options.presence_penalty + options.frequency_penalty * counts
    return penalties


@dataclass(frozen=True)
class TokenScore:
    """The log-probability of a token in the model's own distribution, before any sampling option.

    Attributes:
        token: the token's id.
        logprob: its log-probability; None for the first token of a text, which has none.
        top: ids and log-probabilities of the likeliest tokens at its place, in descending order.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


def score_tokens(logits: paddle.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenScore]:
    """The scores of ``tokens`` under ``logits [b, V]``, each with the ``num_top`` likeliest tokens."""
    scores = log_probabilities(logits)
    chosen = paddle.take_along_axis(scores, paddle.to_tensor(np.array(tokens)[:, None]), axis=1)
    own = chosen.flatten().numpy().tolist()
    top: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if num_top:
        values, ids = largest(scores, min(num_top, scores.shape[-1]))
        pairs = zip(ids.numpy().tolist(), values.numpy().tolist(), strict=True)
        top = [tuple(zip(*pair, strict=True)) for pair in pairs]
    return [TokenScore(*each) for each in zip(tokens, own, top, strict=True)]


def score_prompt(model: NextTokenModel, tokens: Sequence[int], num_top: int) -> list[TokenScore]:
    """The score of each token of a text, given those before it; the first has none.

    Args:
        model: computes the logits.
        tokens: the text, at least one token.
        num_top: how many of the likeliest tokens to list at each place.
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
