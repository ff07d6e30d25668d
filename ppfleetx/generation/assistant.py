"""Assisted decoding (Leviathan et al., 2023): a small model proposes tokens, and the model checks them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ppfleetx.config.errors import ConfigError
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.generation.continuous import ContinuousBatch
from ppfleetx.generation.session import NextTokenModel
from ppfleetx.generation.text import NoTokenizer


class Assistant:
    """A model that proposes the next tokens of another model's rows, by greedy search. Rows longer than
    ``max_positions`` get no proposals."""

    def __init__(self, model: NextTokenModel, max_positions: int, tokenizer: Tokenizer | NoTokenizer) -> None:
        self.model, self.max_positions, self._tokenizer = model, max_positions, tokenizer

    def check(self, tokenizer: Tokenizer | NoTokenizer, place: str) -> None:
        """Raise ConfigError unless the model to assist has the same tokens."""
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
    """Rows for which an assistant proposes tokens, with the assistant's cache of these rows."""

    def __init__(self, assistant: Assistant) -> None:
        self._assistant, self._batch = assistant, ContinuousBatch(assistant.model)

    def propose(self, rows: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        """Propose up to ``counts[i]`` tokens after ``rows[i]``.

        ``rows`` continue the rows of the previous call, in the same order, with wrong proposals removed.
        """
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
