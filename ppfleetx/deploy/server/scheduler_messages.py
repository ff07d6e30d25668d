"""Messages between the web application and the scheduler thread: requests (`Work`), events in reply, and the
state of running sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.deploy.server.protocol import ApiError
from ppfleetx.generation.decode_loop import FinishReason, Row
from ppfleetx.generation.gumbel_sampling import RandomStream
from ppfleetx.generation.sampling import RowChoice, TokenScore
from ppfleetx.generation.sampling_params import RowTokens, SamplingParams
from ppfleetx.generation.speculative_decoding import look_up, next_width
from ppfleetx.generation.text_io import RowText, StopReason


@dataclass(frozen=True)
class NewText:
    """Event: a new token of continuation ``index`` of the request. ``text`` is the text that can now be sent;
    it is empty if, for example, a UTF-8 character is still incomplete. If the request asks for no tokens,
    there is one event for each continuation, with ``num_tokens`` 0; otherwise ``num_tokens`` is 1."""

    index: int
    text: str
    finish_reason: FinishReason | None
    score: TokenScore | None = None
    num_tokens: int = 1
    stop_reason: StopReason = None


@dataclass(frozen=True)
class Scored:
    """Event: the log-probability of each token of a prompt. ``prompt_index`` is the index of the prompt in
    the request."""

    prompt_index: int
    scores: Sequence[TokenScore]


@dataclass(frozen=True)
class Embedded:
    """Event: the embedding of a prompt, ``[h]`` float32, with L2 norm 1. ``prompt_index`` is the index of
    the prompt in the request."""

    prompt_index: int
    vector: np.ndarray


@dataclass(frozen=True)
class Failed:
    """Event: the whole request has failed. The client gets ``error`` as the response."""

    error: ApiError


Event = NewText | Scored | Embedded | Failed


@dataclass(frozen=True)
class PromptRequest:
    """One prompt of a request, with the options to run it.

    Attributes:
        prompt_index: index of the prompt in its request.
        first_index: index of the prompt's first continuation among all continuations of the request.
        copies: number of continuations to generate.
        end_ids: the tokens that end a continuation, and the stop reason of each.
        include_stop: whether the text includes the stop string or the end token.
        num_top: number of alternatives to list with each token's log-probability; None: no log-probabilities.
        scores_prompt: whether to compute log-probabilities of the prompt's tokens.
        is_embedded: whether to compute the prompt's embedding.
        adapter: name of the LoRA adapter to use; None: the base model.
    """

    prompt_index: int
    first_index: int
    ids: Sequence[int]
    copies: int
    max_new_tokens: int
    min_new_tokens: int
    end_ids: Mapping[int, StopReason]
    options: SamplingParams
    seed: int
    stops: tuple[str, ...]
    include_stop: bool = False
    num_top: int | None = None
    scores_prompt: bool = False
    is_embedded: bool = False
    adapter: str | None = None


@dataclass(eq=False)
class Work:
    """A request in the scheduler, with its prompts. ``deliver`` is called with each event of the request, in
    the thread of the event loop. A ``cancelled`` request ends before the next step."""

    prompts: Sequence[PromptRequest]
    deliver: Callable[[Event], None]
    cancelled: bool = False

    @property
    def num_rows(self) -> int:
        return sum(prompt.copies for prompt in self.prompts)


@dataclass(frozen=True, eq=False)
class Waiting:
    """A prompt in the queue, until the batch has room for its sequences."""

    work: Work
    prompt: PromptRequest

    @property
    def copies(self) -> int:
        return self.prompt.copies


class RunningSequence:
    """A sequence in the running batch: one continuation of a prompt, with its text, random numbers and draft
    tokens. ``copy`` is its index among the continuations of the prompt."""

    def __init__(self, one: Waiting, copy: int, tokenizer: Tokenizer) -> None:
        prompt = one.prompt
        self.work, self.prompt, self.drafts = one.work, prompt, []
        self._width = 1
        self._history = list(prompt.ids)
        self._index = prompt.first_index + copy
        self._row = Row(prompt.max_new_tokens)
        self._pieces: list[str] = []
        self._text = RowText(
            tokenizer,
            prompt.stops,
            prompt.ids,
            self._pieces.append,
            end_ids=prompt.end_ids,
            min_tokens=prompt.min_new_tokens,
            include_stop=prompt.include_stop,
        )
        self._stream = (
            RandomStream(prompt.seed, prompt.prompt_index, copy, tokenizer.vocab_size)
            if prompt.options.temperature > 0
            else None
        )

    @property
    def num_new(self) -> int:
        return len(self._row.ids)

    @property
    def is_finished(self) -> bool:
        return self._row.finish_reason is not None

    def choice(self) -> RowChoice:
        numbers: np.ndarray | None = None if self._stream is None else self._stream.numbers(self.num_new)[0]
        forbidden = tuple(self.prompt.end_ids) if self.num_new < self.prompt.min_new_tokens else ()
        return RowChoice(self.prompt.options, RowTokens(self._history, self.num_new), numbers, forbidden)

    def take(self, token: int, score: TokenScore | None) -> NewText:
        """Add a new token to the sequence. Returns the event for the client."""
        self._history.append(token)
        is_stopped = self._text.feed(token)
        is_end = token in self.prompt.end_ids
        if not self._row.add(token, is_last=is_end or is_stopped):
            self._text.finish()
        text = "".join(self._pieces)
        self._pieces.clear()
        reason = self._row.finish_reason
        stop_reason = self._text.stop_reason if reason == "stop" else None
        return NewText(self._index, text, reason, score, stop_reason=stop_reason)

    def draft(self, most: int) -> int:
        """Find up to ``most`` draft tokens by prompt lookup in the sequence's earlier tokens, and store them
        in :attr:`drafts`. Returns the number of draft tokens."""
        left = self.prompt.max_new_tokens - self.num_new - 1
        self.drafts = look_up(np.array(self._history), min(self._width, left, most)).tolist()
        return len(self.drafts)

    def adapt_drafts(self, right: int, most: int) -> None:
        """Discard the draft tokens after a pass that accepted ``right`` of them. Then set the number of
        tokens to draft for the next pass, at most ``most`` (:func:`next_width`)."""
        if self.drafts:
            self._width = next_width(self._width, right, most, right == len(self.drafts))
        self.drafts = []
