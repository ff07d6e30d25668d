"""The requests that the HTTP side hands to the model's thread, their sequences, and the answers it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.deploy.server.protocol import ApiError
from ppfleetx.generation.gumbel_sampling import RandomStream
from ppfleetx.generation.prompt_lookup import guess, next_width
from ppfleetx.generation.sampling import RowChoice, RowOptions, TokenScore
from ppfleetx.generation.search import FinishReason, Row
from ppfleetx.generation.text import RowText


@dataclass(frozen=True)
class Progress:
    """One new token of a continuation, as text, which may be empty.

    Attributes:
        index: of the continuation in its request.
        finish_reason: given with the last one.
        score: of the token, where it was asked for.
        num_tokens: 1; 0 for a continuation that has no token.
    """

    index: int
    text: str
    finish_reason: FinishReason | None
    score: TokenScore | None = None
    num_tokens: int = 1


@dataclass(frozen=True)
class Scored:
    """The scores of a prompt's tokens.

    Attributes:
        number: of the prompt in its request.
        scores: of each token, the first included.
    """

    number: int
    scores: Sequence[TokenScore]


@dataclass(frozen=True)
class Failed:
    """The request as a whole has ended without its answer."""

    error: ApiError


Event = Progress | Scored | Failed


@dataclass(frozen=True)
class Job:
    """One prompt of a request.

    Attributes:
        number: of the prompt in its request; with the seed it decides the random numbers.
        first_index: number of its first continuation among all of the request.
        ids: tokens, at least one.
        copies: continuations.
        max_new_tokens: fits the model together with ``ids``; 0: nothing is generated.
        num_top: how many alternatives are listed with each token's score; None: no scores.
        scores_prompt: the tokens of the prompt get scores, too.
    """

    number: int
    first_index: int
    ids: Sequence[int]
    copies: int
    max_new_tokens: int
    min_new_tokens: int
    options: RowOptions
    seed: int
    stops: tuple[str, ...]
    num_top: int | None = None
    scores_prompt: bool = False


@dataclass(eq=False)
class Work:
    """A request: its prompts, and where its events go.

    Attributes:
        deliver: called in the thread of the event loop.
        cancelled: no client waits for the answer any more; it is dropped at the next step.
    """

    jobs: Sequence[Job]
    deliver: Callable[[Event], None]
    cancelled: bool = False

    @property
    def num_rows(self) -> int:
        return sum(job.copies for job in self.jobs)


@dataclass(frozen=True, eq=False)
class Waiting:
    """A prompt that waits for a place in the batch."""

    work: Work
    job: Job

    @property
    def copies(self) -> int:
        return self.job.copies


class Running:
    """Its text, its length, its random numbers, and what is guessed of it.

    Args:
        one: the prompt.
        copy: number of this continuation of it.
        tokenizer: of the model.
        end_ids: tokens that end an answer.
    """

    def __init__(self, one: Waiting, copy: int, tokenizer: Tokenizer, end_ids: tuple[int, ...]) -> None:
        job = one.job
        self.work, self.job, self.guesses = one.work, job, []
        self._end_ids, self._width = end_ids, 1
        self._history = list(job.ids)
        self._index = job.first_index + copy
        self._row = Row(job.max_new_tokens)
        self._pieces: list[str] = []
        self._text = RowText(tokenizer, job.stops, job.ids, self._pieces.append)
        self._stream = (
            RandomStream(job.seed, job.number, copy, tokenizer.vocab_size)
            if job.options.temperature > 0
            else None
        )

    @property
    def num_new(self) -> int:
        return len(self._row.ids)

    @property
    def is_finished(self) -> bool:
        return self._row.finish_reason is not None

    def choice(self) -> RowChoice:
        """What the next token is chosen by."""
        numbers: np.ndarray | None = None if self._stream is None else self._stream.numbers(self.num_new)[0]
        forbidden = self._end_ids if self.num_new < self.job.min_new_tokens else ()
        return RowChoice(self.job.options, self._history, numbers, forbidden, self.num_new)

    def take(self, token: int, score: TokenScore | None) -> Progress:
        """Add a token; what the client learns of it."""
        self._history.append(token)
        is_stopped = self._text.feed(token)
        is_end = token in self._end_ids
        if not self._row.add(token, is_last=is_end or is_stopped):
            self._text.finish()
        text = "".join(self._pieces)
        self._pieces.clear()
        return Progress(self._index, text, self._row.finish_reason, score)

    def guess(self, most: int) -> int:
        """Guess what may come next, at most so many tokens; how many they are."""
        left = self.job.max_new_tokens - self.num_new - 1
        self.guesses = guess(np.array(self._history), min(self._width, left, most)).tolist()
        return len(self.guesses)

    def learn(self, right: int, most: int) -> None:
        """So many guesses were right; the next ones are as many as that deserves."""
        if self.guesses:
            self._width = next_width(self._width, right, most, right == len(self.guesses))
        self.guesses = []
