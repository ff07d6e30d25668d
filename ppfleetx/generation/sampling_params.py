"""The options for choosing tokens, and the logit processors (:data:`PROCESSORS`).

To add an option, add a key to :class:`~ppfleetx.config.sections.generation.TokenOptions`, a field to
:class:`SamplingParams` and an entry to :data:`PROCESSORS`. The command line, the Python API and the server
then support it.

Shape letters: b rows (sequences of the batch), V vocabulary size.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import paddle
from numpy.lib.stride_tricks import sliding_window_view

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.generation import StructuredOutputs, TokenOptions
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.generation.decoding_session import pad_left
from ppfleetx.generation.gumbel_sampling import draw
from ppfleetx.generation.logits_processors import candidates, penalize_repetition
from ppfleetx.generation.text_io import NoTokenizer, StopReason, text_bytes

_KEY = "Generation.structured_outputs"
_MOST_MATCHERS = 256
_WHITESPACE = r" |\n {0,20}"
"""White space allowed between JSON tokens. Its length is limited, because a small model might otherwise never
stop writing white space."""


class Grammar:
    """The grammar of the output format ``form``, such as a JSON schema. It determines which tokens are
    allowed next. The output ends with one of the tokens ``end_ids``. Raises ConfigError if llguidance is
    missing or does not support the format, or if there is no tokenizer or no end token."""

    def __init__(
        self, form: StructuredOutputs, tokenizer: Tokenizer | NoTokenizer, end_ids: tuple[int, ...]
    ) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise ConfigError("needs llguidance: pip install 'ppfleetx[structured]'", key=_KEY)
        if isinstance(tokenizer, NoTokenizer):
            raise ConfigError("without a tokenizer there is no text that could have a form", key=_KEY)
        if not end_ids:
            raise ConfigError(
                "a text in this form ends at an end token, and none is set (eos_token_id, ignore_eos)",
                key=_KEY,
            )
        try:
            grammar = _grammar(form)
        except ValueError as error:
            raise ConfigError(str(error), key=_KEY) from error
        from llguidance import LLMatcher

        start = LLMatcher(_tokenizer(tokenizer, end_ids), grammar, log_level=0)
        if start.is_error():
            raise ConfigError(_reason(start.get_error()), key=_KEY)
        start.compute_bitmask()
        if start.is_error():
            raise ConfigError("no text can begin this form", key=_KEY)
        self._start, self._vocab_size = start, tokenizer.vocab_size
        self._matchers: dict[tuple[int, ...], Any] = {}  # key: the new tokens of a row

    def allowed(self, new: tuple[int, ...]) -> np.ndarray:
        """Return which tokens of the vocabulary are allowed after the generated tokens ``new``, as a bool
        array ``[V]``."""
        matcher = self._matchers.pop(new[:-1], None) if new else None
        if matcher is None:
            matcher = self._start.deep_copy()
            matcher.consume_tokens(list(new))
        elif not matcher.is_stopped():
            matcher.consume_token(new[-1])
        self._matchers[new] = matcher
        if len(self._matchers) > _MOST_MATCHERS:  # finished rows leave their matchers behind
            self._matchers.pop(next(iter(self._matchers)))
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)


def _reason(error: str) -> str:
    """Return the first line of an llguidance error message and its lines that begin with ``error:``, joined.
    The excerpt of the grammar in between is left out."""
    first, *more = error.splitlines()
    return " ".join([first, *(line.removeprefix("error: ") for line in more if line.startswith("error: "))])


def _grammar(form: StructuredOutputs) -> str:
    """Convert the output format ``form`` to llguidance's grammar format. Raises ValueError if that is not
    possible, for example if a number in a JSON schema is too large."""
    from llguidance import LLMatcher, grammar_from

    schema = {"type": "object"} if form.json_object else form.json_schema
    if schema is not None:
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE})
    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.choice is not None:
        return grammar_from("choice", json.dumps(form.choice))
    return grammar_from("grammar", form.grammar)


@lru_cache(maxsize=4)  # building the table of the whole vocabulary is slow
def _tokenizer(tokenizer: Tokenizer, end_ids: tuple[int, ...]) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    def encode(text: str) -> list[int]:
        return tokenizer.encode_continuation(text, parse_special_tokens=False)

    encode.eos_token_id, encode.bos_token_id = end_ids[0], None
    encode.tokens = [text_bytes(tokenizer, one) for one in range(tokenizer.vocab_size)]
    encode.special_token_ids = sorted(tokenizer.special_ids)
    return LLTokenizer(TokenizerWrapper(encode), eos_token=list(end_ids))


@dataclass(frozen=True)
class SamplingParams:
    """The options of ``TokenOptions`` that act on logits. Strings, such as bad words, are converted to
    token ids."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    structured_outputs: Grammar | None = None

    @classmethod
    def of(
        cls, options: TokenOptions, tokenizer: Tokenizer | NoTokenizer, end_ids: tuple[int, ...]
    ) -> SamplingParams:
        """Make the sampling parameters from the options of a ``Generation`` section or a server request.
        Raises ConfigError if an option does not fit the tokenizer, or needs a missing library."""
        known = {field.name: getattr(options, field.name) for field in fields(cls)}
        words = [one for word in options.bad_words for one in _bad_word_sequences(word, tokenizer)]
        for key, ids in (
            ("bad_words", [one for word in words for one in word]),
            ("suppress_tokens", options.suppress_tokens),
            ("logit_bias", options.logit_bias),
        ):
            check_ids(key, ids, tokenizer)
        form = options.structured_outputs
        known |= {
            "logit_bias": tuple(sorted(options.logit_bias.items())),
            "bad_words": tuple(dict.fromkeys(words)),
            "structured_outputs": None if form is None else Grammar(form, tokenizer, end_ids),
        }
        return cls(**known)

    @property
    def change_logits(self) -> bool:
        return any(getattr(self, name) != getattr(PLAIN, name) for name in PROCESSORS)


PLAIN = SamplingParams()
"""Default options: logits are unchanged, and all tokens can be drawn."""


def chosen(logits: paddle.Tensor, options: SamplingParams, exponentials: np.ndarray | None) -> paddle.Tensor:
    """Choose the next token for each row of the processed ``logits [b, V]``: the likeliest token at
    temperature 0, else a sample. ``exponentials [b, n]`` are this step's random numbers from each row's
    `RandomStream` (`race_size` gives n), or None at temperature 0. Returns token ids ``[b]`` int64."""
    if options.temperature == 0.0:
        return logits.argmax(-1)
    weights = candidates(
        logits,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        typical_p=options.typical_p,
    )
    return draw(weights, paddle.to_tensor(exponentials))


def check_ids(key: str, ids: Sequence[int], tokenizer: Tokenizer | NoTokenizer) -> None:
    wrong = next((one for one in ids if one >= tokenizer.vocab_size), None)
    if wrong is not None:
        raise ConfigError(
            f"the vocabulary has ids 0 to {tokenizer.vocab_size - 1}", key=f"Generation.{key}", value=wrong
        )


def ended_by(
    options: TokenOptions,
    stops: Sequence[str],
    end_ids: tuple[int, ...],
    tokenizer: Tokenizer | NoTokenizer,
) -> dict[int, StopReason]:
    """Return the tokens that end a sequence, and the stop reason of each: the model's ``end_ids``, unless
    ``ignore_eos`` is set, the tokens of ``options.stop_token_ids``, and those of ``stops`` that are special
    tokens, which are not in the text. Raises ConfigError if a stop token is not in the tokenizer's
    vocabulary."""
    check_ids("stop_token_ids", options.stop_token_ids, tokenizer)
    reasons: dict[int, StopReason] = {} if options.ignore_eos else dict.fromkeys(end_ids)
    for token in options.stop_token_ids:
        reasons.setdefault(token, token)
    for stop in stops:
        if (token := tokenizer.special_id(stop)) is not None:
            reasons.setdefault(token, stop)
    return reasons


def _bad_word_sequences(
    word: str | tuple[int, ...], tokenizer: Tokenizer | NoTokenizer
) -> list[tuple[int, ...]]:
    """Return the token sequences to forbid for one entry of ``bad_words``. An entry of token ids is one
    sequence. A string is tokenized twice, without and with a space before it. If the first tokens of the
    two results are the same, only the result without the space is returned."""
    if not isinstance(word, str):
        return [word]
    inside, after_space = (
        tuple(tokenizer.encode_prompt(text, add_special_tokens=False, parse_special_tokens=False))
        for text in (word.lstrip() or word, f" {word.lstrip()}")
    )
    return [one for one in (inside, after_space) if one and (one is inside or one[0] != inside[0])]


@dataclass(frozen=True)
class RowTokens:
    """The tokens of one sequence, prompt included. The last ``num_new`` of them were generated."""

    ids: Sequence[int] | np.ndarray
    num_new: int

    @property
    def new(self) -> Sequence[int] | np.ndarray:
        return self.ids[len(self.ids) - self.num_new :]


def process_logits(
    logits: paddle.Tensor,
    options: SamplingParams,
    rows: Sequence[RowTokens],
    forbidden: tuple[int, ...] = (),
) -> paddle.Tensor:
    """Apply the logit processors that ``options`` enable to ``logits [b, V]``, in the order of
    :data:`PROCESSORS`. Then forbid the tokens ``forbidden``, such as end tokens before the minimum length.
    With structured output, a processor that would forbid all remaining tokens of a row does not apply to
    that row. Beam search passes log-probabilities instead of logits."""
    given = {name: getattr(options, name) for name in PROCESSORS}
    steps = [(PROCESSORS[name], value) for name, value in given.items() if value != getattr(PLAIN, name)]
    if forbidden:
        steps.append((_forbid_tokens, forbidden))
    for processor, value in steps:
        before, logits = logits, processor(logits, value, rows)
        if options.structured_outputs is not None and processor is not _follow_grammar:
            logits = paddle.where(paddle.isfinite(logits).any(-1, keepdim=True), logits, before)
    return logits


def _add_bias(logits: paddle.Tensor, bias: tuple[tuple[int, float], ...], _: Any) -> paddle.Tensor:
    added = np.zeros(logits.shape[-1], np.float32)
    for token, amount in bias:
        added[token] = np.clip(amount, -1e30, 1e30)  # stays finite in float32 after temperature is applied
    return logits + paddle.to_tensor(added)


def _penalize_repetition(logits: paddle.Tensor, factor: float, rows: Sequence[RowTokens]) -> paddle.Tensor:
    history, _ = pad_left([row.ids for row in rows])
    return penalize_repetition(logits, paddle.to_tensor(history), factor)


def _penalize_presence(logits: paddle.Tensor, amount: float, rows: Sequence[RowTokens]) -> paddle.Tensor:
    return logits - amount * paddle.to_tensor(np.minimum(_generated_counts(rows, logits.shape[-1]), 1.0))


def _penalize_frequency(logits: paddle.Tensor, amount: float, rows: Sequence[RowTokens]) -> paddle.Tensor:
    return logits - amount * paddle.to_tensor(_generated_counts(rows, logits.shape[-1]))


def _generated_counts(rows: Sequence[RowTokens], vocab_size: int) -> np.ndarray:
    counts = [np.bincount(np.asarray(row.new, np.int64), minlength=vocab_size) for row in rows]
    return np.stack(counts).astype(np.float32)


def _forbid_ngrams(logits: paddle.Tensor, size: int, rows: Sequence[RowTokens]) -> paddle.Tensor:
    banned = np.zeros(logits.shape, bool)
    for row, tokens in zip(banned, rows, strict=True):
        ids = np.asarray(tokens.ids)
        if len(ids) >= size:
            ngrams = sliding_window_view(ids, size)
            begun = (ngrams[:, :-1] == ids[len(ids) - size + 1 :]).all(axis=1)
            row[ngrams[begun, -1]] = True
    return _forbid_where(logits, banned)


def _forbid_words(
    logits: paddle.Tensor, words: tuple[tuple[int, ...], ...], rows: Sequence[RowTokens]
) -> paddle.Tensor:
    banned = np.zeros(logits.shape, bool)
    for row, tokens in zip(banned, rows, strict=True):
        for *begin, last in words:
            if not begin or list(tokens.ids[-len(begin) :]) == begin:
                row[last] = True
    return _forbid_where(logits, banned)


def _forbid_tokens(logits: paddle.Tensor, ids: tuple[int, ...], _: Any) -> paddle.Tensor:
    banned = np.zeros(logits.shape[-1], bool)
    banned[list(ids)] = True
    return _forbid_where(logits, banned)


def _follow_grammar(logits: paddle.Tensor, grammar: Grammar, rows: Sequence[RowTokens]) -> paddle.Tensor:
    allowed = np.stack([grammar.allowed(tuple(map(int, row.new))) for row in rows])
    return _forbid_where(logits, ~allowed)


def _forbid_where(logits: paddle.Tensor, banned: np.ndarray) -> paddle.Tensor:
    return paddle.where(paddle.to_tensor(banned), paddle.full([], -np.inf, dtype=logits.dtype), logits)


PROCESSORS: dict[str, Callable[[paddle.Tensor, Any, Sequence[RowTokens]], paddle.Tensor]] = {
    "logit_bias": _add_bias,
    "repetition_penalty": _penalize_repetition,
    "presence_penalty": _penalize_presence,
    "frequency_penalty": _penalize_frequency,
    "structured_outputs": _follow_grammar,
    "no_repeat_ngram_size": _forbid_ngrams,
    "bad_words": _forbid_words,
    "suppress_tokens": _forbid_tokens,
}
"""The logit processor of each option of :class:`SamplingParams`, in the order of transformers. Structured
output comes before the options that forbid tokens, because these must not forbid all tokens that the grammar
allows."""
