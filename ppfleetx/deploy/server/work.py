"""The requests that the HTTP side hands to the model's thread, and the answers it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ppfleetx.deploy.server.errors import ApiError
from ppfleetx.generation.sampling import RowOptions, TokenScore
from ppfleetx.generation.search import FinishReason


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
