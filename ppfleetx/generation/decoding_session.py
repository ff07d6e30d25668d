"""Run a model to get next-token logits for a batch of growing sequences (rows).

Shape letters: b rows, n columns (positions) so far, h hidden size, V vocabulary size without padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import paddle

from ppfleetx.distributed.collectives import all_gather_columns
from ppfleetx.generation.fused_blocks import FusedBlocks, fused_blocks_of
from ppfleetx.generation.kv_cache import GrowingCache
from ppfleetx.models.gpt.layers import TiedHead
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn.panel_matmul import PanelMatrix, use_huge_pages
from ppfleetx.nn.quantized import QuantizedEmbedding, QuantizedMatrix


class NextTokenModel:
    """Computes next-token logits with a model: only for the last positions of each sequence, and without
    vocabulary padding. All ranks of a tensor-parallel ``vocab_group`` must call every method at the same
    time.

    Attributes:
        head_matrix: the matrix of a tied head, ``[h, V]``, a transposed copy of the word embedding; 8-bit
            integers if the embedding is quantized. With tensor parallelism, it has only this rank's columns.
            None if the head is not tied.
        quantized_head: if the head is tied and quantized, ``head_matrix`` together with its scales; else
            None.
        switch_length: the length above which LongRoPE changes a sequence's rotary angles, which makes cached
            keys invalid. None for other models.
    """

    def __init__(self, model: StagedModel, vocab_size: int, vocab_group: Any = None) -> None:
        self.model, self.vocab_size, self._vocab_group = model, vocab_size, vocab_group
        self.switch_length: int | None = getattr(model.stages[0], "switch_length", None)
        self.head_matrix: paddle.Tensor | None = None
        self.quantized_head: QuantizedMatrix | None = None
        if isinstance(model.stages[-1], TiedHead):
            # On a CPU, multiplying by a transposed [V, h] takes more than twice as long as by [h, V].
            with paddle.no_grad():
                table, rows = model.stages[-1].word_embeddings, vocab_size if vocab_group is None else None
                if isinstance(table, QuantizedEmbedding):
                    self._head = self.quantized_head = table.head_matrix(rows)
                else:
                    self._head = PanelMatrix(table.weight[:rows].transpose([1, 0]).contiguous())
            self.head_matrix = self._head.weight
            use_huge_pages(self.head_matrix)
        for parameter in model.parameters():
            use_huge_pages(parameter)
        self._layer_by_layer = False

    @cached_property
    def _fused(self) -> FusedBlocks | None:
        return fused_blocks_of(self.model.stages[1:-1])

    def with_cache(
        self,
        tokens: paddle.Tensor,
        position_ids: paddle.Tensor,
        visible: np.ndarray,
        cache: GrowingCache,
        num_last: int = 1,
        row_lengths: np.ndarray | None = None,
    ) -> paddle.Tensor:
        """Run the model on new ``tokens [b, s]`` int64, which follow the n columns (positions) in
        ``cache``. Returns the logits ``[b, V]`` float32 after the last token.

        Args:
            position_ids: ``[b, s]`` positions of the tokens.
            visible: ``[b, n + s]`` bool: the columns that each row may attend to. In the first pass, only
                padding on the left can be hidden.
            num_last: the number of last positions to return logits for. The result is
                ``[num_last * b, V]``, and the b rows of one position are consecutive.
            row_lengths: ``[b]`` number of tokens of each row. None: count the row's visible columns.
        """
        *_, head = self.model.stages
        hidden = self.hidden_states(tokens, position_ids, visible, cache, row_lengths)
        last = hidden[-num_last:].flatten(0, 1) if len(hidden) > num_last else hidden.flatten(0, 1)
        if self.head_matrix is not None:
            return self._all_columns(head.capped(self._head.linear(last)))
        return self._all_columns(head((last.unsqueeze(0),)).squeeze(0))

    def hidden_states(
        self,
        tokens: paddle.Tensor,
        position_ids: paddle.Tensor,
        visible: np.ndarray,
        cache: GrowingCache,
        row_lengths: np.ndarray | None = None,
    ) -> paddle.Tensor:
        """Run the model without its head on new ``tokens [b, s]`` int64, which follow the n columns
        (positions) in ``cache``. Returns the hidden states ``[s, b, h]`` of the tokens after the final
        norm. Blocks and final norm run as one fused operator where possible.

        Args:
            position_ids: ``[b, s]`` positions of the tokens.
            visible: ``[b, n + s]`` bool: the columns that each row may attend to. In the first pass, only
                padding on the left can be hidden.
            row_lengths: ``[b]`` number of tokens of each row. None: count the row's visible columns.
        """
        state = (tokens, position_ids)
        if not cache.length and not visible.all():
            state = (*state, document_starts(visible.argmax(axis=1), tokens.shape[1]))
        cache.extend(tokens.shape[1], visible, row_lengths)
        embedding, *rest, _ = self.model.stages
        state = embedding(state, cache)
        if self.switch_length is not None:
            position_ids = state[1]
        fused = None if paddle.is_grad_enabled() or self._layer_by_layer else self._fused
        if fused is not None and (cache.has_past or fused.takes_prompts):
            done = fused.run(state[0], position_ids, cache)
            if done is not None:
                return done
        for stage in rest:
            state = stage(state, cache)
        return state[0]

    @contextmanager
    def layer_by_layer(self) -> Iterator[None]:
        """Context manager in which layers run one by one, so that their forward hooks are called. The fused
        operator for all blocks would skip the hooks."""
        self._layer_by_layer = True
        try:
            yield
        finally:
            self._layer_by_layer = False

    def without_cache(
        self, tokens: paddle.Tensor, position_ids: paddle.Tensor, document_start: paddle.Tensor | None
    ) -> paddle.Tensor:
        """Compute the next-token logits ``[b, V]`` float32 without a key/value cache, by one forward pass
        over the whole sequences ``tokens``, int64 [b, length].
        """
        logits = self.model(tokens, position_ids, document_start)
        return self._all_columns(logits[-1])

    def _all_columns(self, logits: paddle.Tensor) -> paddle.Tensor:
        if self._vocab_group is not None:
            logits = all_gather_columns(logits, self._vocab_group)
        if logits.shape[-1] != self.vocab_size:
            logits = logits[:, : self.vocab_size]
        return logits.astype("float32")


def document_starts(padding: np.ndarray, num_positions: int) -> paddle.Tensor:
    """Return the first position that each position may attend to, ``[b, num_positions]`` int32. In row i,
    this is always the first position after the left padding of ``padding[i]`` tokens."""
    starts = np.broadcast_to(padding[:, None], (len(padding), num_positions))
    return paddle.to_tensor(starts.astype(np.int32))


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Left-pad the token ids of prompts to the length n of the longest one, by repeating each prompt's first
    token. Returns the array ``[b, n]`` int64, and the number of padding tokens of each prompt, ``[b]`` int64.
    """
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    padding = lengths.max() - lengths
    # The padding repeats the first token, so the repetition penalty sees no other tokens.
    rows = [
        np.concatenate([np.full(columns, prompt[0], dtype=np.int64), np.asarray(prompt, np.int64)])
        for prompt, columns in zip(prompts, padding, strict=True)
    ]
    return np.stack(rows), padding


class DecodingSession:
    """A batch of sequences (rows) that all grow by one token per step. Each row gets the logits it would get
    alone. With ``use_cache=False``, every step runs all tokens again."""

    def __init__(self, model: NextTokenModel, prompts: Sequence[Sequence[int]], *, use_cache: bool) -> None:
        assert prompts, "a session has rows"
        assert all(prompts), "a row starts from at least one token"
        self._model = model
        self._cache = GrowingCache() if use_cache else None
        self.history, self._padding = pad_left(prompts)

    @property
    def num_rows(self) -> int:
        return self.history.shape[0]

    def rows(self) -> list[np.ndarray]:
        """Return the tokens of each sequence, prompt included, without padding."""
        return [row[padding:] for row, padding in zip(self.history, self._padding, strict=True)]

    def next_logits(self) -> paddle.Tensor:
        """Compute the logits ``[b, V]`` float32 for the next token of each row."""
        length = self.history.shape[1]
        if self._cache is not None and self._outgrows(length):
            self._cache = GrowingCache()
        past = 0 if self._cache is None else self._cache.length
        columns = np.arange(past, length, dtype=np.int64)
        positions = np.maximum(columns[None, :] - self._padding[:, None], 0)
        tokens, position_ids = paddle.to_tensor(self.history[:, past:]), paddle.to_tensor(positions)
        if self._cache is None:
            start = document_starts(self._padding, length) if self._padding.any() else None
            return self._model.without_cache(tokens, position_ids, start)
        visible = np.arange(length) >= self._padding[:, None]
        return self._model.with_cache(tokens, position_ids, visible, self._cache)

    def _outgrows(self, length: int) -> bool:
        switch = self._model.switch_length
        return switch is not None and bool((length - self._padding == switch + 1).any())

    def append(self, tokens: np.ndarray) -> None:
        """Append token ``tokens[i]`` to row i; ``tokens`` is ``[b]``."""
        self.history = np.concatenate([self.history, tokens[:, None].astype(np.int64)], axis=1)

    def select(self, rows: np.ndarray) -> None:
        """Replace the rows of the batch: new row ``i`` is a copy of old row ``rows[i]``."""
        self.history, self._padding = self.history[rows], self._padding[rows]
        if self._cache is not None:
            self._cache.select(paddle.to_tensor(rows.astype(np.int64)))
