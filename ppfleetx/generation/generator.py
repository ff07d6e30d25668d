"""Prompts in, continuations out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from ppfleetx.config.counts import counted
from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.sections import GenerationConfig, ModelConfig
from ppfleetx.data.tokenizer import Tokenizer
from ppfleetx.generation.beam import BeamOptions, beam_search
from ppfleetx.generation.lookup import MOST_ROWS, decode_with_lookup
from ppfleetx.generation.search import Choose, FinishReason, Row, Rules, Sampler, decode, greedy, uniforms
from ppfleetx.generation.session import DecodingSession, NextTokenModel
from ppfleetx.generation.text import RowText
from ppfleetx.models.staged import StagedModel
from ppfleetx.utils.log import get_logger

Prompt = str | Sequence[int]
OnText = Callable[[int, int, str], None]
"""(prompt number, continuation number, new piece of its text)."""


@dataclass(frozen=True)
class Generation:
    """One continuation of a prompt.

    Attributes:
        text: without the prompt, the end token and the stop string.
        ids: new token ids as the model gave them, the end token included.
        finish_reason: ``stop`` (end token or stop string) or ``length``.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason


class TextGenerator(ABC):
    """What every way of continuing prompts has in common: ids, limits, batches, text.

    Args:
        tokenizer: of the model.
        max_positions: most tokens of a prompt and its continuation together.
    """

    def __init__(self, tokenizer: Tokenizer, max_positions: int) -> None:
        self._tokenizer, self._max_positions = tokenizer, max_positions

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def max_positions(self) -> int:
        """Most tokens of a prompt and its continuation together."""
        return self._max_positions

    def generate(
        self,
        prompts: Sequence[Prompt],
        cfg: GenerationConfig,
        *,
        seed: int = 0,
        on_text: OnText | None = None,
        batch_rows: int = 16,
        first_prompt: int = 0,
    ) -> list[list[Generation]]:
        """Continue each prompt ``cfg.num_return_sequences`` times.

        Args:
            prompts: texts or token ids. An empty one starts from the end-of-text token.
            cfg: the ``Generation`` section.
            seed: used when ``cfg.seed`` is None.
            on_text: told of text as it is made, see :data:`OnText`.
            batch_rows: sequences under way at the same time (at least those of one prompt); no effect on
                the result beyond float rounding.
            first_prompt: number of the first prompt in a larger list, which decides its random numbers.

        Raises:
            ConfigError: an option that does not fit the model or the prompts.
        """
        encoded = [self._encode(prompt) for prompt in prompts]
        num_new = [self._new_tokens(len(ids), cfg, first_prompt + i) for i, ids in enumerate(encoded)]
        per_prompt = cfg.num_beams if cfg.decode_strategy == "beam_search" else cfg.num_return_sequences
        per_batch = max(1, batch_rows // per_prompt)
        results: list[list[Generation]] = []
        for start in range(0, len(encoded), per_batch):
            part = slice(start, start + per_batch)
            batch = Batch(cfg, seed, first_prompt + start, num_new[part], on_text)
            texts = [self._row_text(batch, batch.first_prompt + i, copy) for i, copy in batch.streams]
            rows = self._continue(encoded[part], batch, texts)
            finished = [_generation(row, text) for row, text in zip(rows, texts, strict=True)]
            copies = cfg.num_return_sequences
            results += [finished[i : i + copies] for i in range(0, len(finished), copies)]
        return results

    @abstractmethod
    def _continue(self, prompts: list[list[int]], batch: Batch, texts: list[RowText]) -> list[Row]:
        """Rows of new tokens in the order of ``batch.streams``, each of them fed to its text."""

    def _row_text(self, batch: Batch, prompt: int, copy: int) -> RowText:
        stop = batch.cfg.stop or ()
        emit = None if batch.on_text is None else _bound(batch.on_text, prompt, copy)
        return RowText(self._tokenizer, (stop,) if isinstance(stop, str) else stop, emit)

    def _encode(self, prompt: Prompt) -> list[int]:
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
        wrong = [i for i in ids if not 0 <= i < self._tokenizer.vocab_size]
        if wrong:
            raise DataError(f"token id {wrong[0]} of a prompt is not one of {self._tokenizer.place}")
        return ids or [self._tokenizer.eod_id]

    def _new_tokens(self, prompt_length: int, cfg: GenerationConfig, number: int) -> int:
        """How many tokens a prompt may get: ``max_dec_len``, when it was asked for; else what fits."""
        room = self._max_positions - prompt_length
        if cfg.max_dec_len <= room:
            return cfg.max_dec_len
        facts = (
            f"prompt {number} has {counted(prompt_length, 'token')}, which leaves room for {max(room, 0)} "
            f"more in the model's {self._max_positions} positions (Model.max_position_embeddings)"
        )
        if room <= 0 or room < cfg.min_dec_len or "max_dec_len" in cfg.model_fields_set:
            raise ConfigError(facts, key="Generation.max_dec_len", value=cfg.max_dec_len)
        get_logger().warning("%s: Generation.max_dec_len is %d here", facts, room)
        return room


class Generator(TextGenerator):
    """Continues prompts with a model. Weights are taken as they are when the generator is made.

    Args:
        model: the model: all its stages, in this process.
        model_cfg: its ``Model`` section: vocabulary and number of positions.
        tokenizer: the one it was trained with.
        vocab_group: see :class:`~ppfleetx.generation.session.NextTokenModel`. The ranks of this group
            generate from the same prompts at the same time; what they get is the same.

    Raises:
        DataError: the tokenizer has ids that the model has not.
    """

    def __init__(
        self, model: StagedModel, model_cfg: ModelConfig, tokenizer: Tokenizer, vocab_group: Any = None
    ) -> None:
        check_vocabulary(tokenizer, model_cfg)
        super().__init__(tokenizer, model_cfg.max_position_embeddings)
        self._model = model
        # A model may have more ids than its tokenizer; what cannot be written is not generated.
        self._next_token = NextTokenModel(model, tokenizer.vocab_size, vocab_group)

    @property
    def next_token_model(self) -> NextTokenModel:
        """What gives the logits, for whoever runs a loop of his own (with the model in `eval` mode)."""
        return self._next_token

    def _continue(self, prompts: list[list[int]], batch: Batch, texts: list[RowText]) -> list[Row]:
        was_training = self._model.training
        self._model.eval()
        try:
            with paddle.no_grad():
                if batch.uses_lookup:
                    return self._decode_with_lookup(prompts, batch, texts)
                session = DecodingSession(self._next_token, prompts, use_cache=batch.cfg.use_cache)
                if batch.cfg.decode_strategy == "beam_search":
                    return self._search(session, batch, texts)
                return self._decode(session, batch, texts)
        finally:
            if was_training:
                self._model.train()

    def _decode(self, session: DecodingSession, batch: Batch, texts: list[RowText]) -> list[Row]:
        def on_token(row: int, token_id: int) -> bool:
            return texts[row].feed(token_id)

        rules, limits = self._rules(batch.cfg), batch.max_new_tokens
        copies = batch.cfg.num_return_sequences
        return decode(session, batch.choose(), rules, limits, copies=copies, on_token=on_token)

    def _decode_with_lookup(self, prompts: list[list[int]], batch: Batch, texts: list[RowText]) -> list[Row]:
        return decode_with_lookup(
            self._next_token,
            prompts,
            self._rules(batch.cfg),
            batch.max_new_tokens,
            batch.cfg.prompt_lookup_num_tokens,
            on_token=lambda row, token_id: texts[row].feed(token_id),
        )

    def _search(self, session: DecodingSession, batch: Batch, texts: list[RowText]) -> list[Row]:
        """Beam search: which tokens stay is known at the end only, so all text comes then."""
        cfg = batch.cfg
        options = BeamOptions(
            cfg.num_beams, cfg.length_penalty, cfg.early_stopping, cfg.num_beam_groups, cfg.diversity_rate
        )
        rows = beam_search(session, self._rules(cfg), batch.max_new_tokens, options, cfg.num_return_sequences)
        for row, text in zip(rows, texts, strict=True):
            for token_id in row.ids:
                text.feed(token_id)
        return rows

    def _rules(self, cfg: GenerationConfig) -> Rules:
        return Rules(
            self._tokenizer.eod_id,
            cfg.min_dec_len,
            cfg.repetition_penalty,
            self._known_id(cfg, "forced_bos_token_id"),
            self._known_id(cfg, "forced_eos_token_id"),
        )

    def _known_id(self, cfg: GenerationConfig, name: str) -> int | None:
        """A token id of the section, which must be one of the tokenizer's."""
        token_id = getattr(cfg, name)
        if token_id is not None and token_id >= self._tokenizer.vocab_size:
            raise ConfigError(
                f"{self._tokenizer.place} has ids 0 to {self._tokenizer.vocab_size - 1}",
                key=f"Generation.{name}",
                value=token_id,
            )
        return token_id


def check_vocabulary(tokenizer: Tokenizer, model_cfg: ModelConfig) -> None:
    """Raise DataError when ``tokenizer`` has ids that a model of this ``Model`` section has not."""
    if tokenizer.vocab_size > model_cfg.vocab_size:
        raise DataError(
            f"{tokenizer.place} has {tokenizer.vocab_size} token ids, the model has "
            f"{model_cfg.vocab_size} (Model.vocab_size): it was trained with another tokenizer"
        )


@dataclass(frozen=True)
class Batch:
    """What the prompts of one batch have in common.

    Attributes:
        cfg: the ``Generation`` section.
        default_seed: counts when ``cfg.seed`` is None.
        first_prompt: number of the first prompt of the batch in the whole list.
        max_new_tokens: of each prompt.
        on_text: see :data:`OnText`.
    """

    cfg: GenerationConfig
    default_seed: int
    first_prompt: int
    max_new_tokens: list[int]
    on_text: OnText | None

    @property
    def streams(self) -> list[tuple[int, int]]:
        """(prompt of the batch, copy) of each row."""
        copies = self.cfg.num_return_sequences
        return [(i, copy) for i in range(len(self.max_new_tokens)) for copy in range(copies)]

    @property
    def uses_lookup(self) -> bool:
        """Whether tokens are guessed: for few rows, where the likeliest is taken, which repeats itself."""
        cfg = self.cfg
        is_greedy = cfg.decode_strategy == "greedy_search" and cfg.num_return_sequences == 1
        is_small = len(self.max_new_tokens) <= MOST_ROWS
        return is_greedy and is_small and cfg.use_cache and cfg.prompt_lookup_num_tokens > 0

    @property
    def seed(self) -> int:
        return self.default_seed if self.cfg.seed is None else self.cfg.seed

    def random_numbers(self) -> np.ndarray:
        """``[rows, steps]`` float32: what :class:`~ppfleetx.generation.search.Sampler` draws for each row."""
        steps = max(self.max_new_tokens)
        rows = [uniforms(self.seed, self.first_prompt + prompt, copy, steps) for prompt, copy in self.streams]
        return np.stack(rows)

    def choose(self) -> Choose:
        """How the tokens of the rows are chosen."""
        cfg = self.cfg
        if cfg.decode_strategy == "greedy_search":
            return greedy
        return Sampler(
            self.seed,
            [(self.first_prompt + prompt, copy) for prompt, copy in self.streams],
            max(self.max_new_tokens),
            temperature=cfg.temperature,
            top_k=cfg.top_k,
            top_p=cfg.top_p,
        )


def _bound(on_text: OnText, prompt: int, copy: int) -> Callable[[str], None]:
    return lambda piece: on_text(prompt, copy, piece)


def _generation(row: Row, text: RowText) -> Generation:
    assert row.finish_reason is not None
    return Generation(text.finish(), tuple(row.ids), row.finish_reason)
