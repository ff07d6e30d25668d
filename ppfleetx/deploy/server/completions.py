"""Request and response formats of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from ppfleetx.deploy.server.answers import Answer, RowAnswer, TextLogprobs, choice_entry
from ppfleetx.deploy.server.protocol import MOST_TOP, GenerationRequest, NotSupported
from ppfleetx.deploy.server.scheduler_messages import NewText
from ppfleetx.generation.sampling import TokenScore

DEFAULT_MAX_TOKENS = 16

Prompt = str | list[int]


def prompts_of(value: Any) -> list[Prompt]:
    """Return the prompts of a request as a list. ``value`` is one prompt or a list of prompts. A prompt is
    a string or a list of token ids. Raises ValueError for anything else."""
    if isinstance(value, str) or _is_list_of_ids(value):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(p, str) or _is_list_of_ids(p) for p in value):
        raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")
    if not value or not all(value):
        raise ValueError("is empty: there is nothing to continue")
    return value


def _is_list_of_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _read_logprobs(value: Any) -> int | None:
    """Return the ``logprobs`` of a completion request: the number of alternative tokens to list for each
    token. ``false`` becomes None. Raises ValueError for an invalid value."""
    if value is False:
        return None
    if type(value) is not int or not 0 <= value <= MOST_TOP:
        raise ValueError(f"must be a number from 0 to {MOST_TOP}: the alternatives of each token")
    return value


class CompletionRequest(GenerationRequest):
    """The body of a ``POST /v1/completions`` request."""

    prompt: Annotated[list[Prompt], BeforeValidator(prompts_of)]
    max_tokens: int = Field(DEFAULT_MAX_TOKENS, ge=0)
    echo: bool = False
    add_special_tokens: bool = True
    best_of: int | None = Field(None, ge=1)
    logprobs: Annotated[int | None, BeforeValidator(_read_logprobs)] = None
    suffix: NotSupported = None

    @model_validator(mode="after")
    def _check_best(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of: {self.best_of} is less than n = {self.n}")
        if self.candidates > self.n and self.stream:
            raise ValueError("best_of: the best is known at the end only, so it cannot be streamed")
        return self

    @property
    def token_limit(self) -> int:
        return self.max_tokens

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    @property
    def candidates(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def scores_prompt(self) -> bool:
        return self.echo and self.logprobs is not None


class CompletionAnswer(Answer):
    """Builds the response to a :class:`CompletionRequest`, as a whole or in chunks. ``echoes`` has the text
    of each prompt, which the response repeats if the request sets ``echo``."""

    object_name = piece_name = "text_completion"
    request: CompletionRequest

    def __init__(self, request: CompletionRequest, *more: Any, echoes: Sequence[str], **options: Any) -> None:
        super().__init__(request, *more, **options)
        self._echoes = echoes
        self._logprobs: dict[int, TextLogprobs] = {}

    def whole_choice(
        self, index: int, prompt_index: int, row: RowAnswer, prompt_scores: Sequence[TokenScore]
    ) -> Any:
        echo = self._echoes[prompt_index] if self.request.echo else ""
        logprobs = self._scores(index, [*prompt_scores, *self.without_end(row.scores)])
        text = "".join([echo, *row.texts])
        return choice_entry(index, {"text": text}, logprobs, row.reason, row.stop_reason)

    def opening(self, index: int, prompt_scores: Sequence[TokenScore]) -> Any | None:
        if not self.request.echo:
            return None
        echo = self._echoes[index // self.request.candidates]
        return choice_entry(index, {"text": echo}, self._scores(index, prompt_scores))

    def piece(self, event: NewText) -> Any | None:
        scores = [] if event.score is None else self.without_end([event.score])
        logprobs = self._scores(event.index, scores)
        if not (event.text or event.finish_reason or (logprobs and logprobs["tokens"])):
            return None
        return choice_entry(
            event.index, {"text": event.text}, logprobs, event.finish_reason, event.stop_reason
        )

    def _scores(self, index: int, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        return self._logprobs.setdefault(index, TextLogprobs(self.tokenizer)).of(scores)
