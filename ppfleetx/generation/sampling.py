"""Sample next tokens for a batch whose sequences (rows) have different options, and compute
log-probabilities and embeddings of prompts.

Shape letters: b rows, V vocabulary size without padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from ppfleetx.generation.decoding_session import NextTokenModel
from ppfleetx.generation.kv_cache import GrowingCache
from ppfleetx.generation.logits_processors import largest, log_probabilities
from ppfleetx.generation.sampling_params import RowTokens, SamplingParams, chosen, process_logits

_COLUMNS = 128  # prompt positions per pass, which bounds the memory for logits


@dataclass(frozen=True)
class RowChoice:
    """The inputs for choosing the next token of one sequence.

    Attributes:
        tokens: the sequence so far.
        exponentials: ``[n]`` random numbers of this step from the sequence's `RandomStream` (`race_size`
            gives n); None at temperature 0.
        forbidden: ids that must not be chosen, such as end tokens before the minimum length.
    """

    options: SamplingParams
    tokens: RowTokens
    exponentials: np.ndarray | None = None
    forbidden: tuple[int, ...] = ()


def choose_tokens(logits: paddle.Tensor, choices: Sequence[RowChoice]) -> list[int]:
    """Choose the next token for each row of ``logits [b, V]``. ``choices[i]`` has the options of row i; rows
    with equal options are processed together.
    """
    groups: dict[tuple[SamplingParams, tuple[int, ...]], list[int]] = {}
    for row, choice in enumerate(choices):
        groups.setdefault((choice.options, choice.forbidden), []).append(row)
    tokens = [0] * len(choices)
    for (options, forbidden), rows in groups.items():
        part = logits if len(groups) == 1 else logits.index_select(paddle.to_tensor(rows), axis=0)
        part = process_logits(part, options, [choices[row].tokens for row in rows], forbidden)
        numbers = [choices[row].exponentials for row in rows]
        new = chosen(part, options, None if options.temperature == 0.0 else np.stack(numbers))
        for row, token in zip(rows, new.numpy().tolist(), strict=True):
            tokens[row] = token
    return tokens


@dataclass(frozen=True)
class TokenScore:
    """The log-probability of a token, and the likeliest tokens at its position. Sampling options such as
    temperature are not applied. ``logprob`` is None for the first token of a prompt. ``top`` lists (token
    id, log-probability) pairs, the likeliest first."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


def score_tokens(logits: paddle.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenScore]:
    """Compute the log-probability of ``tokens[i]`` in row i of ``logits [b, V]``, and the ``num_top``
    likeliest tokens of that row."""
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
    """Compute the log-probability of each token of a prompt, given the tokens before it, and the
    ``num_top`` likeliest tokens at its position. The first token has no log-probability.
    """
    scores, row_lengths = [TokenScore(tokens[0], None)], np.array([len(tokens) - 1])
    for start, part, *inputs in _chunks(tokens[:-1]):
        logits = model.with_cache(*inputs, part, row_lengths)
        scores += score_tokens(logits, list(tokens[start + 1 : start + 1 + part]), num_top)
    return scores


def embedding_of(model: NextTokenModel, tokens: Sequence[int]) -> np.ndarray:
    """Return the embedding ``[h]`` float32 of the sequence ``tokens``: the hidden state of the last token
    after the final norm, scaled to L2 norm 1.
    """
    for _start, _size, *inputs in _chunks(tokens):
        hidden = model.hidden_states(*inputs, np.array([len(tokens)]))
    vector = hidden[-1, 0].astype("float32").numpy()
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


def _chunks(
    tokens: Sequence[int],
) -> Iterator[tuple[int, int, paddle.Tensor, paddle.Tensor, np.ndarray, GrowingCache]]:
    """Split ``tokens`` into chunks, and yield the inputs of the forward pass on each chunk.

    Yields:
        The index of the chunk's first token; the number s of tokens in the chunk; the token ids and the
        positions, int64 [1, s] each; an attention mask that hides nothing; and the key/value cache, which all
        chunks share.
    """
    cache = GrowingCache()
    for start in range(0, len(tokens), _COLUMNS):
        part = np.array(tokens[start : start + _COLUMNS], np.int64)[None]
        end = start + part.shape[1]
        positions = paddle.to_tensor(np.arange(start, end, dtype=np.int64)[None])
        yield start, part.shape[1], paddle.to_tensor(part), positions, np.ones((1, end), bool), cache
