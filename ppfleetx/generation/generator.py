"""Generate continuations of prompts: check options and lengths, divide the prompts into batches, and decode
the generated tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import paddle

from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.message_text import counted
from ppfleetx.config.sections.root import GenerationConfig, ModelConfig
from ppfleetx.data.tokenizer.tokenizer import Tokenizer, check_tokenizer
from ppfleetx.generation.beam import BeamOptions, beam_search
from ppfleetx.generation.decode_loop import FinishReason, Row, Rules, decode
from ppfleetx.generation.decoding_session import DecodingSession, NextTokenModel
from ppfleetx.generation.gumbel_sampling import RandomStream
from ppfleetx.generation.sampling import TokenScore
from ppfleetx.generation.sampling_params import SamplingParams, check_ids, ended_by
from ppfleetx.generation.speculative_decoding import MOST_ROWS, Assistant, ProposedRows, decode_with_drafts
from ppfleetx.generation.text_io import NoTokenizer, Prompt, RowText, StopReason, token_ids
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.utils.log import get_logger

OnText = Callable[[int, int, str], None]
"""Callback for streamed text: (prompt index, continuation index, new text)."""


@dataclass(frozen=True)
class Batch:
    """The options for generating continuations of one batch of prompts.

    Attributes:
        default_seed: the seed to use if ``cfg.seed`` is None.
        first_prompt: the index of the batch's first prompt in the caller's list.
        max_new_tokens: limit of new tokens for each prompt.
        end_ids: the tokens that end a continuation, and the stop reason of each.
    """

    cfg: GenerationConfig
    default_seed: int
    first_prompt: int
    max_new_tokens: list[int]
    end_ids: dict[int, StopReason]
    options: SamplingParams
    on_text: OnText | None

    @property
    def is_greedy(self) -> bool:
        strategy = self.cfg.decode_strategy
        return strategy == "greedy_search" or (strategy == "sampling" and self.cfg.temperature == 0.0)

    @property
    def streams(self) -> list[tuple[int, int]]:
        copies = self.cfg.num_return_sequences
        return [(i, copy) for i in range(len(self.max_new_tokens)) for copy in range(copies)]

    @property
    def is_speculative(self) -> bool:
        """Whether to generate this batch by speculative decoding."""
        cfg = self.cfg
        if cfg.assistant_model is not None:
            return True
        # Prompt lookup pays off for greedy search of a few prompts.
        is_plain = self.is_greedy and cfg.num_return_sequences == 1 and cfg.logprobs is None
        is_small = len(self.max_new_tokens) <= MOST_ROWS
        return is_plain and is_small and cfg.use_cache and cfg.prompt_lookup_num_tokens > 0

    @property
    def seed(self) -> int:
        return self.default_seed if self.cfg.seed is None else self.cfg.seed

    def random_streams(self, vocab_size: int) -> list[RandomStream]:
        """Return the random number stream of each sequence. The numbers do not depend on how prompts are
        divided into batches."""
        first = self.first_prompt
        return [RandomStream(self.seed, first + prompt, copy, vocab_size) for prompt, copy in self.streams]


@dataclass(frozen=True)
class Generation:
    """One continuation of a prompt. Comparison ignores ``logprobs`` and ``score``, which depend on rounding.

    Attributes:
        text: the new text, without the prompt, the end token and the stop string (unless
            ``cfg.include_stop_str_in_output`` is set).
        ids: the generated token ids, including the end token.
        finish_reason: ``stop`` (end token or stop string) or ``length``.
        logprobs: the log-probability of each generated token; None if ``cfg.logprobs`` is None.
        score: in beam search, log-probability / length ** length_penalty; otherwise None.
        stop_reason: the stop string or the token of ``cfg.stop_token_ids`` that ended the continuation;
            otherwise None.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenScore, ...] | None = field(default=None, compare=False)
    score: float | None = field(default=None, compare=False)
    stop_reason: StopReason = None


class TextGenerator(ABC):
    """Base class of generators. It encodes prompts, checks length limits and decodes the generated tokens.
    Subclasses generate the tokens of one batch. ``max_positions`` limits the length of a prompt plus its
    continuation, in tokens."""

    takes_assistant = False
    """Whether this generator supports `Generation.assistant_model`."""

    def __init__(self, tokenizer: Tokenizer | NoTokenizer, max_positions: int) -> None:
        self.tokenizer, self.max_positions = tokenizer, max_positions

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
        """Generate ``cfg.num_return_sequences`` continuations of each prompt. Returns one list of
        continuations per prompt.

        Args:
            prompts: strings (encoded by `Tokenizer.encode_prompt`) or lists of token ids. An empty prompt
                becomes the BOS token or, without BOS, the end-of-document token.
            seed: the seed if ``cfg.seed`` is None.
            on_text: callback for each new piece of text.
            batch_rows: the maximum number of sequences in one batch. The sequences of one prompt are always
                in the same batch, so a batch of a single prompt can be larger.
            first_prompt: the index of the first prompt in a larger list, if ``prompts`` are part of one.
                Random numbers depend on this index.

        Raises:
            ConfigError: an option does not fit the model or the prompts.
            DataError: a prompt is neither a string nor a list of valid token ids.
        """
        if cfg.stop is not None and isinstance(self.tokenizer, NoTokenizer):
            raise ConfigError(
                "without a tokenizer there is no text to look for it in",
                key="Generation.stop",
                value=cfg.stop,
            )
        if cfg.assistant_model is not None and not self.takes_assistant:
            raise ConfigError(
                "this program takes no assistant", key="Generation.assistant_model", value=cfg.assistant_model
            )
        end_ids = ended_by(cfg, cfg.stops, self.end_ids(cfg), self.tokenizer)
        options = SamplingParams.of(cfg, self.tokenizer, tuple(end_ids))
        encoded = [self._encode(prompt) for prompt in prompts]
        num_new = [self._new_tokens(len(ids), cfg, first_prompt + i) for i, ids in enumerate(encoded)]
        per_prompt = cfg.num_beams if cfg.decode_strategy == "beam_search" else cfg.num_return_sequences
        per_batch = max(1, batch_rows // per_prompt)
        results: list[list[Generation]] = []
        for start in range(0, len(encoded), per_batch):
            part = slice(start, start + per_batch)
            batch = Batch(cfg, seed, first_prompt + start, num_new[part], end_ids, options, on_text)
            texts = [self._row_text(batch, encoded[start + i], i, copy) for i, copy in batch.streams]
            rows = self._continue(encoded[part], batch, texts)
            scored = cfg.logprobs is not None
            finished = [_generation(row, text, scored) for row, text in zip(rows, texts, strict=True)]
            copies = cfg.num_return_sequences
            results += [finished[i : i + copies] for i in range(0, len(finished), copies)]
        return results

    def end_ids(self, cfg: GenerationConfig) -> tuple[int, ...]:
        """Return the model's end tokens: those that ``cfg`` names or, if it names none, the tokenizer's.
        Raises ConfigError for an id outside the tokenizer's vocabulary."""
        check_ids("eos_token_id", cfg.end_ids or (), self.tokenizer)
        return self.tokenizer.end_ids if cfg.end_ids is None else cfg.end_ids

    @abstractmethod
    def _continue(self, prompts: list[list[int]], batch: Batch, texts: list[RowText]) -> list[Row]:
        """Generate all continuations of a batch of prompts, in the order of the prompts. ``texts`` has a
        :class:`RowText` for each continuation, in the same order; a subclass must give it each new token."""

    def _row_text(self, batch: Batch, ids: list[int], prompt: int, copy: int) -> RowText:
        cfg = batch.cfg
        emit = None if batch.on_text is None else partial(batch.on_text, batch.first_prompt + prompt, copy)
        return RowText(
            self.tokenizer,
            cfg.stops,
            ids,
            emit,
            end_ids=batch.end_ids,
            min_tokens=cfg.min_dec_len,
            include_stop=cfg.include_stop_str_in_output,
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        ids = self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else token_ids(prompt)
        prefix = [*self.tokenizer.prefix_ids]
        if isinstance(prompt, str) and prefix and ids[len(prefix) : 2 * len(prefix)] == prefix:
            get_logger().warning(
                "a prompt begins with %r, which %s adds as well: it is there twice, as in transformers",
                self.tokenizer.decode(prefix),
                self.tokenizer.place,
            )
        wrong = [i for i in ids if not 0 <= i < self.tokenizer.vocab_size]
        if wrong:
            raise DataError(f"token id {wrong[0]} of a prompt is not one of {self.tokenizer.place}")
        return ids or [self.tokenizer.start_id]

    def _new_tokens(self, prompt_length: int, cfg: GenerationConfig, number: int) -> int:
        """Return the maximum number of new tokens for a prompt: ``cfg.max_dec_len`` if that many fit into
        the model's context. If the user did not set ``max_dec_len``, the default is reduced to what fits,
        with a warning. ``number`` is the prompt's index, for messages.

        Raises:
            ConfigError: the user set a ``max_dec_len`` that does not fit, or there is no room for one new
                token or for ``cfg.min_dec_len`` new tokens.
        """
        room = self.max_positions - prompt_length
        if cfg.max_dec_len <= room:
            return cfg.max_dec_len
        facts = (
            f"prompt {number} has {counted(prompt_length, 'token')}, which leaves room for {max(room, 0)} "
            f"more in the model's {self.max_positions} positions (Model.max_position_embeddings)"
        )
        if room <= 0 or room < cfg.min_dec_len or "max_dec_len" in cfg.model_fields_set:
            raise ConfigError(facts, key="Generation.max_dec_len", value=cfg.max_dec_len)
        get_logger().warning("%s: Generation.max_dec_len is %d here", facts, room)
        return room


class Generator(TextGenerator):
    """Generates text with a model in this process. Load the model's weights before you create the
    generator, which may copy some of them. Without a tokenizer, prompts and results are token ids.
    ``load_assistant`` loads the draft model ``Generation.assistant_model``. Raises DataError if the
    tokenizer has ids outside the model's vocabulary.

    All ranks of a tensor-parallel ``vocab_group`` must call `generate` with the same prompts at the same
    time.
    """

    def __init__(
        self,
        model: StagedModel,
        model_cfg: ModelConfig,
        tokenizer: Tokenizer | None,
        vocab_group: Any = None,
        load_assistant: Callable[[str], Assistant] | None = None,
    ) -> None:
        if tokenizer is not None:
            check_tokenizer(tokenizer, model_cfg.vocab_size, is_trained=True)
        known = NoTokenizer(model_cfg.vocab_size) if tokenizer is None else tokenizer
        super().__init__(known, model_cfg.max_position_embeddings)
        self._model, self._load_assistant = model, load_assistant
        self.takes_assistant = load_assistant is not None
        self._assistants: dict[str, Assistant] = {}
        # The model's vocabulary may be larger than the tokenizer's; only ids of the tokenizer are generated.
        self.next_token_model = NextTokenModel(model, known.vocab_size, vocab_group)

    def _continue(self, prompts: list[list[int]], batch: Batch, texts: list[RowText]) -> list[Row]:
        was_training = self._model.training
        self._model.eval()
        try:
            with paddle.no_grad():
                if batch.is_speculative:
                    return self._decode_with_drafts(prompts, batch, texts)
                session = DecodingSession(self.next_token_model, prompts, use_cache=batch.cfg.use_cache)
                if batch.cfg.decode_strategy == "beam_search":
                    return self._search(session, batch, texts)
                return self._decode(session, batch, texts)
        finally:
            if was_training:
                self._model.train()

    def _decode(self, session: DecodingSession, batch: Batch, texts: list[RowText]) -> list[Row]:
        return decode(
            session,
            self._rules(batch),
            batch.max_new_tokens,
            streams=() if batch.is_greedy else batch.random_streams(self.next_token_model.vocab_size),
            copies=batch.cfg.num_return_sequences,
            on_token=lambda row, token_id: texts[row].feed(token_id),
            num_top=batch.cfg.logprobs,
        )

    def _assistant(self, place: str) -> Assistant:
        if place not in self._assistants:
            assert self._load_assistant is not None
            assistant = self._load_assistant(place)
            assistant.check(self.tokenizer, place)
            self._assistants[place] = assistant
        return self._assistants[place]

    def _decode_with_drafts(self, prompts: list[list[int]], batch: Batch, texts: list[RowText]) -> list[Row]:
        cfg = batch.cfg
        assistant = None if cfg.assistant_model is None else self._assistant(cfg.assistant_model)
        return decode_with_drafts(
            self.next_token_model,
            prompts,
            self._rules(batch),
            batch.max_new_tokens,
            cfg.prompt_lookup_num_tokens if assistant is None else cfg.num_assistant_tokens,
            assistant=None if assistant is None else ProposedRows(assistant),
            on_token=lambda row, token_id: texts[row].feed(token_id),
        )

    def _search(self, session: DecodingSession, batch: Batch, texts: list[RowText]) -> list[Row]:
        """Run beam search on a batch. The callback for new text is called only at the end, because beams can
        change until then."""
        cfg = batch.cfg
        options = BeamOptions(
            cfg.num_beams, cfg.length_penalty, cfg.early_stopping, cfg.num_beam_groups, cfg.diversity_rate
        )
        rules, limits = self._rules(batch), batch.max_new_tokens
        rows = beam_search(session, rules, limits, options, cfg.num_return_sequences)
        for row, text in zip(rows, texts, strict=True):
            for token_id in row.ids:
                text.feed(token_id)
        return rows

    def _rules(self, batch: Batch) -> Rules:
        cfg, keys = batch.cfg, ("forced_bos_token_id", "forced_eos_token_id")
        forced = [getattr(cfg, key) for key in keys]
        for key, token_id in zip(keys, forced, strict=True):
            check_ids(key, () if token_id is None else (token_id,), self.tokenizer)
        return Rules(tuple(batch.end_ids), cfg.min_dec_len, batch.options, *forced)


def _generation(row: Row, text: RowText, scored: bool) -> Generation:
    assert row.finish_reason is not None
    logprobs = tuple(row.scores) if scored else None
    written = text.finish()
    reason = text.stop_reason if row.finish_reason == "stop" else None
    return Generation(written, tuple(row.ids), row.finish_reason, logprobs, row.rank_score, reason)
