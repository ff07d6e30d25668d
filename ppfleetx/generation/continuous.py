"""Rows that join and leave a batch between two steps (continuous batching; Yu et al., 2022, "Orca").

Shape letters: b rows, n positions so far, V true vocabulary, g key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from ppfleetx.generation.cache import ConcatCache
from ppfleetx.generation.processors import candidates, draw, forbid, penalize_repetition
from ppfleetx.generation.session import NextTokenModel, pad_left

# Of a prompt's columns so many are run at a time: attention's scores, and the masks kept for them, would
# otherwise grow with the square of its length, most of it for keys that are masked.
_PREFILL_COLUMNS = 512


class JoinableCache(ConcatCache):
    """The cache of rows that end at the same column.

    A shorter row has columns on its left that hold nothing; whoever asks the model masks them.
    """

    def forget_first(self, columns: int) -> None:
        """Forget what is in the first ``columns``, of all rows."""
        if columns:
            for layer, (key, value) in self._layers.items():
                self._layers[layer] = (key[:, :, columns:], value[:, :, columns:])

    def add_rows(self, other: JoinableCache) -> None:
        """Put the rows of ``other`` below these."""
        if not self._layers:
            self._layers = dict(other._layers)
            return
        columns = max(self.length, other.length)
        for layer, pair in self._layers.items():
            key, value = (
                paddle.concat([_widen(mine, columns), _widen(theirs, columns)], axis=0)
                for mine, theirs in zip(pair, other._layers[layer], strict=True)
            )
            self._layers[layer] = (key, value)


def _widen(tensor: paddle.Tensor, columns: int) -> paddle.Tensor:
    """``tensor [b, g, n, d]`` with zeros on the left, ``[b, g, columns, d]``."""
    rows, groups, length, size = tensor.shape
    if length == columns:
        return tensor
    zeros = paddle.zeros([rows, groups, columns - length, size], dtype=tensor.dtype)
    return paddle.concat([zeros, tensor], axis=2)


class ContinuousBatch:
    """A :class:`~ppfleetx.generation.session.DecodingSession` that rows may join at any step.

    A row's logits are those it has alone, up to float rounding, whoever is beside it.

    Args:
        model: gives the logits.
    """

    def __init__(self, model: NextTokenModel) -> None:
        self._model = model
        self.history: list[list[int]] = []
        """Tokens of each row, its prompt first."""
        self._clear()

    @property
    def num_rows(self) -> int:
        return len(self.history)

    def join(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        """Add ``copies[i]`` rows that start from ``prompts[i]``, below the others, at the next step.

        A prompt is run once, however many copies it has.
        """
        assert all(prompts), "a row starts from at least one token"
        for prompt, count in zip(prompts, copies, strict=True):
            self._newcomers.append((list(prompt), count))
            self.history += [list(prompt) for _ in range(count)]

    def next_logits(self) -> paddle.Tensor:
        """Logits ``[b, V]`` float32 for the token after the last one of each row.

        Newcomers' prompts and the last tokens of the others are two calls of the model.
        """
        parts = []
        if len(self._padding):
            last = np.array([[row[-1]] for row in self.history[: len(self._padding)]], dtype=np.int64)
            parts.append(_run(self._model, last, self._padding, self._cache))
        if self._newcomers:
            parts.append(self._prefill())
        return parts[0] if len(parts) == 1 else paddle.concat(parts)

    def append(self, tokens: Sequence[int]) -> None:
        """Add one token to each row."""
        for row, token in zip(self.history, tokens, strict=True):
            row.append(token)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order. Columns that no row needs any more are given back."""
        assert not self._newcomers, "rows are chosen between a step and the next join"
        self.history = [self.history[row] for row in rows]
        if not rows:
            self._clear()
            return
        padding = self._padding[list(rows)]
        unused = int(padding.min())
        self._cache.forget_first(unused)
        self._cache.select(paddle.to_tensor(rows))
        self._padding = padding - unused

    def _clear(self) -> None:
        self._cache = JoinableCache()
        self._padding = np.zeros(0, dtype=np.int64)  # of the rows in the cache
        self._newcomers: list[tuple[list[int], int]] = []

    def _prefill(self) -> paddle.Tensor:
        """Run the newcomers' prompts together and put their keys and values below the others'."""
        prompts, copies = [prompt for prompt, _ in self._newcomers], [n for _, n in self._newcomers]
        tokens, padding = pad_left(prompts)
        cache = JoinableCache()
        for start in range(0, tokens.shape[1], _PREFILL_COLUMNS):
            logits = _run(self._model, tokens[:, start : start + _PREFILL_COLUMNS], padding, cache)
        if max(copies) > 1:
            repeated = np.repeat(np.arange(len(prompts)), copies)
            index = paddle.to_tensor(repeated)
            cache.select(index)
            padding = padding[repeated]
            logits = logits.index_select(index, axis=0)
        before, after = self._cache.length, cache.length
        self._cache.add_rows(cache)
        columns = self._cache.length
        self._padding = np.concatenate([self._padding + (columns - before), padding + (columns - after)])
        self._newcomers = []
        return logits


def _run(
    model: NextTokenModel, tokens: np.ndarray, padding: np.ndarray, cache: JoinableCache
) -> paddle.Tensor:
    """Logits after ``tokens [b, s]``, which follow the columns of ``cache`` in rows with this ``padding``."""
    columns = cache.length + np.arange(tokens.shape[1], dtype=np.int64)
    positions = np.maximum(columns[None, :] - padding[:, None], 0)
    document_start = None
    if padding.any():
        starts = np.broadcast_to(padding[:, None], positions.shape).astype(np.int32)
        document_start = paddle.to_tensor(starts)
    return model.with_cache(paddle.to_tensor(tokens), paddle.to_tensor(positions), document_start, cache)


@dataclass(frozen=True)
class RowOptions:
    """How the tokens of one row are chosen; terms as in the ``Generation`` section.

    Attributes:
        temperature: 0 takes the likeliest token, and ``top_k`` and ``top_p`` have no effect.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class RowChoice:
    """What one row's next token is chosen by.

    Attributes:
        history: tokens of the row so far.
        uniform: number in [0, 1) of the row's own random stream; without effect at temperature 0.
        forbidden: an id that cannot come now (the end token, before the minimum length).
    """

    options: RowOptions
    history: Sequence[int]
    uniform: float = 0.0
    forbidden: int | None = None


def choose_tokens(logits: paddle.Tensor, choices: Sequence[RowChoice]) -> list[int]:
    """One token per row of ``logits [b, V]``. Rows of equal options are treated together."""
    groups: dict[tuple[RowOptions, int | None], list[int]] = {}
    for row, choice in enumerate(choices):
        groups.setdefault((choice.options, choice.forbidden), []).append(row)
    tokens = [0] * len(choices)
    for (options, forbidden), rows in groups.items():
        part = logits if len(groups) == 1 else logits.index_select(paddle.to_tensor(rows), axis=0)
        if options.repetition_penalty != 1.0:
            history, _ = pad_left([choices[row].history for row in rows])
            part = penalize_repetition(part, paddle.to_tensor(history), options.repetition_penalty)
        if forbidden is not None:
            part = forbid(part, forbidden)
        chosen = _choose(part, options, [choices[row].uniform for row in rows])
        for row, token in zip(rows, chosen.numpy().tolist(), strict=True):
            tokens[row] = token
    return tokens


def _choose(logits: paddle.Tensor, options: RowOptions, uniform: Sequence[float]) -> paddle.Tensor:
    if options.temperature == 0.0:
        return logits.argmax(-1)
    weights, ids = candidates(
        logits, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p
    )
    return draw(weights, ids, paddle.to_tensor(np.array(uniform, dtype=np.float32)))
