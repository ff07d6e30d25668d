"""Continuous batching (Yu et al., 2022, "Orca"): sequences join and leave the running batch between steps.

Shape letters: b rows (sequences of the batch), n columns (positions of the cache), V vocabulary size without
padding.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import paddle

from ppfleetx.generation.decoding_session import NextTokenModel, pad_left
from ppfleetx.generation.kv_cache import GrowingCache, Layers
from ppfleetx.generation.prefix_cache import PrefixStore, SeededPrompts, shared

# The number of prompt columns per pass. It bounds the size of attention scores and masks, which would
# otherwise grow with the square of the prompt's length.
_PREFILL_COLUMNS = 512
# Rejected draft tokens leave unused columns. Before a pass, unused columns are removed if they are more than
# this number and more than a quarter of the longest row's length.
_MOST_UNUSED = 64


class JoinableCache(GrowingCache):
    """A key/value cache to which sequences (rows) of any length can be added. Positions of a row can be
    unused, such as padding; the caller must hide them with the argument ``visible`` of :meth:`extend`."""

    def forget_first(self, columns: int) -> None:
        if columns:
            for layer, (key, value) in self._layers.items():
                self._layers[layer] = (
                    key[:, :, columns:].contiguous(),
                    value[:, :, columns:].contiguous(),
                )
            self.length -= columns

    def fill(self, layers: Layers, columns: int, rows: int) -> None:
        """Fill an empty cache with ``rows`` copies of one sequence's prefix. The prefix is the first
        ``columns`` positions of ``layers``, the keys and values of the sequence."""
        index = paddle.zeros([rows], dtype="int64")
        self._layers = {
            layer: tuple(held[:, :, :columns].index_select(index, axis=0) for held in pair)
            for layer, pair in layers.items()
        }
        self.length = columns

    def copy_of(self, row: int, columns: np.ndarray) -> Layers:
        """Return a copy of the keys and values of one row at the positions ``columns``. The keys and the
        values of a layer are [1, key/value heads, number of columns, head size]."""
        index = paddle.to_tensor(columns)
        return {
            layer: tuple(held[row : row + 1].index_select(index, axis=2) for held in pair)
            for layer, pair in self._layers.items()
        }

    def keep_columns(self, columns: np.ndarray) -> None:
        """Keep only the columns (positions) ``columns[i]`` of each row i, in this order."""
        indices = [paddle.to_tensor(row) for row in columns]
        for layer, pair in self._layers.items():
            key, value = (
                paddle.concat([held[i : i + 1].index_select(own, axis=2) for i, own in enumerate(indices)])
                for held in pair
            )
            self._layers[layer] = (key, value)
        self.length = columns.shape[1]

    def add_rows(self, other: JoinableCache) -> None:
        """Append the rows of another cache to this one. If one cache is shorter, it is padded on the left to
        the length of the other."""
        columns = max(self.length, other.length)
        for layer, theirs in other._layers.items():
            mine = self._layers.get(layer, ())
            pairs = [(mine, self.length), (theirs, other.length)] if mine else [(theirs, other.length)]
            key, value = (
                paddle.concat([_widen(pair[part], length, columns) for pair, length in pairs])
                for part in (0, 1)
            )
            self._layers[layer] = (key, value)
        self.length = columns


def _widen(tensor: paddle.Tensor, length: int, columns: int) -> paddle.Tensor:
    """Keep the first ``length`` positions of ``tensor``, and pad them on the left with zeros to ``columns``
    positions. ``tensor`` holds keys or values, [rows, key/value heads, positions, head size]."""
    if tensor.shape[2] == length == columns:
        return tensor
    rows, groups, _, size = tensor.shape
    zeros = paddle.zeros([rows, groups, columns - length, size], dtype=tensor.dtype)
    return paddle.concat([zeros, tensor[:, :, :length]], axis=2)


class ContinuousBatch:
    """Computes next-token logits for a batch of sequences (rows). New prompts can join the batch at any step.
    Each row gets the logits it would get alone, up to float rounding. ``prefixes`` is the prefix cache."""

    def __init__(self, model: NextTokenModel, prefixes: PrefixStore | None = None) -> None:
        self._model, self._prefixes = model, prefixes or PrefixStore(0)
        self.history: list[list[int]] = []
        """The tokens of each row, including its prompt."""
        self._clear()

    @property
    def num_rows(self) -> int:
        return len(self.history)

    @property
    def max_drafts(self) -> int:
        """The maximum number of draft tokens per row in the next pass."""
        # The rotary angles of a LongRoPE row change at switch_length, so no pass may cross it.
        switch = self._model.switch_length
        if switch is None:
            return sys.maxsize
        return min((switch - len(row) for row in self.history if len(row) <= switch), default=sys.maxsize)

    def join(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        """Add ``copies[i]`` identical rows with the prompt ``prompts[i]`` to the batch, for each i. The next
        call of :meth:`next_logits` runs each prompt once."""
        assert all(prompts), "a row starts from at least one token"
        for prompt, count in zip(prompts, copies, strict=True):
            self._newcomers.append((list(prompt), count))
            self.history += [list(prompt) for _ in range(count)]

    def next_logits(self) -> paddle.Tensor:
        """Compute the logits ``[b, V]`` float32 for the next token of each row. The model runs the last
        token of old rows and, for new rows, the part of the prompt that is not in the prefix cache."""
        parts = []
        if len(self._visible):
            parts.append(self._step([()] * len(self._visible)))
        if self._newcomers:
            parts.append(self._prefill())
        return parts[0] if len(parts) == 1 else paddle.concat(parts)

    def logits_with_drafts(self, drafts: Sequence[Sequence[int]]) -> paddle.Tensor:
        """Run each row's last token and its draft tokens in one pass (speculative decoding). The draft tokens
        do not become part of the rows: call :meth:`append` with each row's new tokens afterwards.

        Returns logits ``[1 + s, b, V]`` float32, where s is the largest number of draft tokens of a row, at
        most :attr:`max_drafts`. Index 0 has the logits after each row's last token, and index k those after
        its k-th draft token. For a row with fewer than k draft tokens, the logits at index k are
        meaningless.
        """
        assert not self._newcomers, "newcomers have nothing to guess after"
        assert max(map(len, drafts)) <= self.max_drafts
        return self._step(drafts).reshape([-1, self.num_rows, self._model.vocab_size])

    def logits_after(self, rows: Sequence[Sequence[int]]) -> paddle.Tensor:
        """Replace the tokens of row i by ``rows[i]``, for each i, and return the next-token logits
        ``[b, V]`` float32. The model runs only the tokens after the common prefix of the old and the new
        row. If the batch is empty, ``rows`` are added to it."""
        if not self.history:
            self.join(rows, [1] * len(rows))
            return self.next_logits()
        new: list[list[int]] = []
        for i, (row, held) in enumerate(zip(rows, self.history, strict=True)):
            columns = np.flatnonzero(self._visible[i])
            same = shared(held[: len(columns)], row[:-1])
            self._visible[i, columns[same:]] = False
            self.history[i] = list(row[: same + 1])
            new.append(list(row[same + 1 :]))
        self._free_end()
        logits = self._step(new).reshape([-1, self.num_rows, self._model.vocab_size])
        for i, own in enumerate(new):
            self._visible[i, self._before + 1 + len(own) :] = False
            self.history[i] += own
        self._before = self._cache.length - 1
        return paddle.stack([logits[len(own), i] for i, own in enumerate(new)])

    def append(self, tokens: Sequence[Sequence[int]]) -> None:
        """Append the new tokens of each row after a pass: the accepted draft tokens, then the token chosen
        after them.
        """
        for row, new in enumerate(tokens):
            # The cache has the last token and all draft tokens; only accepted draft tokens stay visible.
            self._visible[row, self._before + len(new) :] = False
            self.history[row] += new
        self._free_end()

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the rows with the indices ``rows``, in this order. Positions at the start of the cache
        that no remaining row uses are freed. Removed rows go to the prefix cache if they are worth storing
        (:meth:`PrefixStore.wants`)."""
        assert not self._newcomers, "rows are chosen between a step and the next join"
        for row in {*range(self.num_rows)} - {*rows}:
            self._remember(self.history[row], self._cache, row, self._visible[row], self._is_long[row])
        self.history = [self.history[row] for row in rows]
        if not rows:
            self._clear()
            return
        self._visible, self._is_long = self._visible[list(rows)], self._is_long[list(rows)]
        unused = int(self._visible.any(axis=0).argmax())
        self._visible = self._visible[:, unused:]
        self._cache.forget_first(unused)
        self._cache.select(paddle.to_tensor(rows))

    def _clear(self) -> None:
        self._cache = JoinableCache()
        # [b, n] for the rows in the cache: whether the row uses the column.
        self._visible = np.zeros((0, 0), dtype=bool)
        # [b] for the same rows: whether the row's keys have LongRoPE's angles for long rows.
        self._is_long = np.zeros(0, dtype=bool)
        self._before = 0  # the cache's number of columns before the last pass
        self._newcomers: list[tuple[list[int], int]] = []

    def _step(self, drafts: Sequence[Sequence[int]]) -> paddle.Tensor:
        rows = self.history[: len(drafts)]
        lengths = np.array([len(row) + len(own) for row, own in zip(rows, drafts, strict=True)])
        self._recompute_switched(lengths)
        self._take_out_unused()
        width = 1 + max(map(len, drafts))
        tokens = np.array(
            [
                [row[-1], *own, *[row[-1]] * (width - len(own) - 1)]
                for row, own in zip(rows, drafts, strict=True)
            ]
        )
        # Rows with fewer draft tokens are padded, and the padding needs valid positions, too.
        filled = np.minimum(np.arange(width), np.array([[len(own)] for own in drafts]))
        positions = filled + np.array([[len(row) - 1] for row in rows])
        self._before = self._cache.length
        self._visible = np.pad(self._visible, ((0, 0), (0, width)), constant_values=True)
        return self._model.with_cache(
            paddle.to_tensor(tokens), paddle.to_tensor(positions), self._visible, self._cache, width, lengths
        )

    def _recompute_switched(self, lengths: np.ndarray) -> None:
        """Recompute the cached keys and values of rows whose length has crossed LongRoPE's ``switch_length``.
        Their cached keys have the rotary angles of the old length. ``lengths [b]`` are the new lengths."""
        is_long = self._are_long(lengths)
        turned = (is_long != self._is_long) & self._visible.any(axis=1)
        self._is_long = is_long
        if not turned.any():
            return
        changed, others = np.flatnonzero(turned), np.flatnonzero(~turned)
        cache = JoinableCache()
        _, visible = self._run([self.history[row][:-1] for row in changed], cache, lengths[changed])
        self._visible = self._visible[others]
        if len(others):
            self._cache.select(paddle.to_tensor(others))
        else:
            self._cache = JoinableCache()
        self._add(cache, visible)
        order = np.argsort(np.concatenate([others, changed]))
        self._cache.select(paddle.to_tensor(order))
        self._visible = self._visible[order]

    def _are_long(self, lengths: np.ndarray) -> np.ndarray:
        switch = self._model.switch_length
        return np.zeros(len(lengths), dtype=bool) if switch is None else lengths > switch

    def _free_end(self) -> None:
        used = 1 + int(np.flatnonzero(self._visible.any(axis=0))[-1])
        self._cache.shorten(used)
        self._visible = self._visible[:, :used]

    def _take_out_unused(self) -> None:
        longest = int(self._visible.sum(axis=1).max())
        if self._cache.length - longest > max(_MOST_UNUSED, longest // 4):
            # A stable sort puts unused columns first and keeps the order of used columns.
            columns = np.argsort(self._visible, axis=1, kind="stable")[:, -longest:]
            self._cache.keep_columns(columns)
            self._visible = np.take_along_axis(self._visible, columns, axis=1)

    def _prefill(self) -> paddle.Tensor:
        prompts, copies = [prompt for prompt, _ in self._newcomers], [n for _, n in self._newcomers]
        are_long = self._are_long(np.array([len(prompt) for prompt in prompts])).tolist()
        parts, first = [], 0
        for group in self._prefixes.groups(prompts, are_long):
            parts.append(self._run_prompts(group, copies[first : first + len(group.prompts)]))
            first += len(group.prompts)
        self._before = self._cache.length - 1
        self._newcomers = []
        return parts[0] if len(parts) == 1 else paddle.concat(parts)

    def _run_prompts(self, group: SeededPrompts, copies: Sequence[int]) -> paddle.Tensor:
        """Run a group of new prompts that start with the same cached prefix, and add ``copies[i]`` rows of
        prompt i to the batch. Returns the logits ``[sum(copies), V]``."""
        cache, lengths = JoinableCache(), np.array([len(prompt) for prompt in group.prompts])
        if group.length:
            cache.fill(group.layers, group.length, len(group.prompts))
        logits, visible = self._run(group.rests, cache, lengths)
        is_long = self._are_long(lengths)
        self._prefixes.num_reused += group.length * len(group.prompts)
        for row, prompt in enumerate(group.prompts):
            self._remember(prompt, cache, row, visible[row], is_long[row])
        if max(copies) > 1:
            repeated = np.repeat(np.arange(len(copies)), copies)
            index = paddle.to_tensor(repeated)
            cache.select(index)
            visible, is_long = visible[repeated], is_long[repeated]
            logits = logits.index_select(index, axis=0)
        self._add(cache, visible)
        self._is_long = np.concatenate([self._is_long, is_long])
        return logits

    def _run(
        self, rows: Sequence[Sequence[int]], cache: JoinableCache, lengths: np.ndarray
    ) -> tuple[paddle.Tensor, np.ndarray]:
        """Run the model on ``rows``, the tokens of each sequence after the positions in ``cache``, and add
        their keys and values to ``cache``. ``lengths [b]`` are the lengths of the whole sequences, which
        determine LongRoPE's rotary angles. Returns the next-token logits ``[b, V]``, and a bool mask
        ``[b, positions]`` that is False at padding."""
        tokens, padding = pad_left(rows)
        past = cache.length
        columns = np.arange(tokens.shape[1], dtype=np.int64) - padding[:, None]
        visible = np.pad(columns >= 0, ((0, 0), (past, 0)), constant_values=True)
        positions = np.maximum(columns, 0) + past
        for start in range(0, tokens.shape[1], _PREFILL_COLUMNS):
            part = slice(start, start + _PREFILL_COLUMNS)
            ids, places = paddle.to_tensor(tokens[:, part]), paddle.to_tensor(positions[:, part])
            logits = self._model.with_cache(ids, places, visible[:, : past + part.stop], cache, 1, lengths)
        return logits, visible

    def _add(self, cache: JoinableCache, visible: np.ndarray) -> None:
        self._cache.add_rows(cache)
        old, new = (
            np.pad(rows, ((0, 0), (self._cache.length - rows.shape[1], 0)))
            for rows in (self._visible, visible)
        )
        self._visible = np.concatenate([old, new])

    def _remember(
        self, tokens: Sequence[int], cache: JoinableCache, row: int, visible: np.ndarray, is_long: bool
    ) -> None:
        if self._prefixes.wants(tokens, is_long):
            columns = np.flatnonzero(visible)[: self._prefixes.max_tokens]
            self._prefixes.put(tokens[: len(columns)], cache.copy_of(row, columns), is_long)
