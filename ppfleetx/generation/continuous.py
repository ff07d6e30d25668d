"""Rows that join and leave a batch between two steps (continuous batching; Yu et al., 2022, "Orca").

Shape letters: b rows, n columns of the cache, V true vocabulary, g key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from ppfleetx.generation.cache import GrowingCache
from ppfleetx.generation.draws import draw
from ppfleetx.generation.processors import candidates, forbid, penalize_repetition
from ppfleetx.generation.session import NextTokenModel, pad_left

# Of a prompt's columns so many are run at a time: attention's scores, and the masks kept for them, would
# otherwise grow with the square of its length, most of it for keys that are masked.
_PREFILL_COLUMNS = 512
# Wrong guesses leave columns that are of no use. More of them than this, and than a quarter of the longest
# row, are taken out before the next pass.
_MOST_UNUSED = 64


class JoinableCache(GrowingCache):
    """The cache of rows that are extended by the same columns, of which each uses its own.

    A shorter row has columns on its left that hold nothing, and wrong guesses leave some in between; whoever
    asks the model says which columns a row may attend to.
    """

    def forget_first(self, columns: int) -> None:
        """Forget what is in the first ``columns``, of all rows."""
        if columns:
            for layer, (key, value) in self._layers.items():
                self._layers[layer] = (
                    key[:, :, columns:].contiguous(),
                    value[:, :, columns:].contiguous(),
                )
            self._length -= columns

    def take(self, columns: np.ndarray) -> None:
        """Keep of each row its ``columns [b, m]``, in this order."""
        indices = [paddle.to_tensor(row) for row in columns]
        for layer, pair in self._layers.items():
            key, value = (
                paddle.concat([held[i : i + 1].index_select(own, axis=2) for i, own in enumerate(indices)])
                for held in pair
            )
            self._layers[layer] = (key, value)
        self._length = columns.shape[1]

    def add_rows(self, other: JoinableCache) -> None:
        """Put the rows of ``other`` below these; all of them end at the same column."""
        columns = max(self.length, other.length)
        for layer, theirs in other._layers.items():
            mine = self._layers.get(layer, ())
            pairs = [(mine, self.length), (theirs, other.length)] if mine else [(theirs, other.length)]
            key, value = (
                paddle.concat([_widen(pair[part], length, columns) for pair, length in pairs])
                for part in (0, 1)
            )
            self._layers[layer] = (key, value)
        self._length = columns


def _widen(tensor: paddle.Tensor, length: int, columns: int) -> paddle.Tensor:
    """The first ``length`` of ``tensor [b, g, k, d]`` with zeros on their left, ``[b, g, columns, d]``."""
    if tensor.shape[2] == length == columns:
        return tensor
    rows, groups, _, size = tensor.shape
    zeros = paddle.zeros([rows, groups, columns - length, size], dtype=tensor.dtype)
    return paddle.concat([zeros, tensor[:, :, :length]], axis=2)


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
        if len(self._visible):
            parts.append(self._step([()] * len(self._visible)))
        if self._newcomers:
            parts.append(self._prefill())
        return parts[0] if len(parts) == 1 else paddle.concat(parts)

    def logits_with_guesses(self, guesses: Sequence[Sequence[int]]) -> paddle.Tensor:
        """Logits ``[1 + s, b, V]`` float32: after the last token of each row, and after each of its guesses.

        s is the number of guesses of the row with most; logits of other rows after theirs mean nothing.
        Guesses do not become part of a row: what is appended next decides which of them were right.
        """
        assert not self._newcomers, "newcomers have nothing to guess after"
        return self._step(guesses).reshape([-1, self.num_rows, self._model.vocab_size])

    def append(self, tokens: Sequence[Sequence[int]]) -> None:
        """Add to each row its new tokens: the guesses that were right, and one more."""
        for row, new in enumerate(tokens):
            # The cache got the last token and the guesses. Of those, the ones that are part of the row stay.
            self._visible[row, self._before + len(new) :] = False
            self.history[row] += new
        used = 1 + int(np.flatnonzero(self._visible.any(axis=0))[-1])
        self._cache.shorten(used)
        self._visible = self._visible[:, :used]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order. Columns that no row needs any more are given back."""
        assert not self._newcomers, "rows are chosen between a step and the next join"
        self.history = [self.history[row] for row in rows]
        if not rows:
            self._clear()
            return
        self._visible = self._visible[list(rows)]
        unused = int(self._visible.any(axis=0).argmax())
        self._visible = self._visible[:, unused:]
        self._cache.forget_first(unused)
        self._cache.select(paddle.to_tensor(rows))

    def _clear(self) -> None:
        self._cache = JoinableCache()
        # [b, n] of the rows in the cache: whether a column holds a key of the row.
        self._visible = np.zeros((0, 0), dtype=bool)
        self._before = 0  # columns before the last pass over these rows
        self._newcomers: list[tuple[list[int], int]] = []

    def _step(self, guesses: Sequence[Sequence[int]]) -> paddle.Tensor:
        """Logits ``[(1 + s) * b, V]`` of the rows in the cache, see :meth:`logits_with_guesses`."""
        self._take_out_unused()
        width = 1 + max(map(len, guesses))
        rows = self.history[: len(guesses)]
        tokens = np.array(
            [
                [row[-1], *own, *[row[-1]] * (width - len(own) - 1)]
                for row, own in zip(rows, guesses, strict=True)
            ]
        )
        # What fills up a row with fewer guesses than another must have a position of the model, too.
        filled = np.minimum(np.arange(width), np.array([[len(own)] for own in guesses]))
        positions = filled + np.array([[len(row) - 1] for row in rows])
        self._before = self._cache.length
        self._visible = np.pad(self._visible, ((0, 0), (0, width)), constant_values=True)
        return self._model.with_cache(
            paddle.to_tensor(tokens), paddle.to_tensor(positions), self._visible, self._cache, width
        )

    def _take_out_unused(self) -> None:
        longest = int(self._visible.sum(axis=1).max())
        if self._cache.length - longest > max(_MOST_UNUSED, longest // 4):
            # Of each row the unused columns first, then the others in their order.
            columns = np.argsort(self._visible, axis=1, kind="stable")[:, -longest:]
            self._cache.take(columns)
            self._visible = np.take_along_axis(self._visible, columns, axis=1)

    def _prefill(self) -> paddle.Tensor:
        """Run the newcomers' prompts together and put their keys and values below the others'."""
        prompts, copies = [prompt for prompt, _ in self._newcomers], [n for _, n in self._newcomers]
        tokens, padding = pad_left(prompts)
        cache = JoinableCache()
        positions = np.arange(tokens.shape[1], dtype=np.int64) - padding[:, None]
        visible = positions >= 0
        for start in range(0, tokens.shape[1], _PREFILL_COLUMNS):
            part = slice(start, start + _PREFILL_COLUMNS)
            ids, places = tokens[:, part], np.maximum(positions[:, part], 0)
            logits = self._model.with_cache(
                paddle.to_tensor(ids), paddle.to_tensor(places), visible[:, : part.stop], cache
            )
        if max(copies) > 1:
            repeated = np.repeat(np.arange(len(prompts)), copies)
            index = paddle.to_tensor(repeated)
            cache.select(index)
            visible = visible[repeated]
            logits = logits.index_select(index, axis=0)
        self._cache.add_rows(cache)
        old, new = (
            np.pad(rows, ((0, 0), (self._cache.length - rows.shape[1], 0)))
            for rows in (self._visible, visible)
        )
        self._visible = np.concatenate([old, new])
        self._before = self._cache.length - 1
        self._newcomers = []
        return logits


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
        exponentials: ``[n]`` numbers of the row's `RandomStream`; not needed at temperature 0.
        forbidden: ids that cannot come now (the end tokens, before the minimum length).
    """

    options: RowOptions
    history: Sequence[int]
    exponentials: np.ndarray | None = None
    forbidden: tuple[int, ...] = ()


def choose_tokens(logits: paddle.Tensor, choices: Sequence[RowChoice]) -> list[int]:
    """One token per row of ``logits [b, V]``. Rows of equal options are treated together."""
    groups: dict[tuple[RowOptions, tuple[int, ...]], list[int]] = {}
    for row, choice in enumerate(choices):
        groups.setdefault((choice.options, choice.forbidden), []).append(row)
    tokens = [0] * len(choices)
    for (options, forbidden), rows in groups.items():
        part = logits if len(groups) == 1 else logits.index_select(paddle.to_tensor(rows), axis=0)
        if options.repetition_penalty != 1.0:
            history, _ = pad_left([choices[row].history for row in rows])
            part = penalize_repetition(part, paddle.to_tensor(history), options.repetition_penalty)
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
