"""The requests that the HTTP side hands to the model's thread, and the answers it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ppfleetx.deploy.server.errors import ApiError
from ppfleetx.generation.continuous import RowOptions
from ppfleetx.generation.search import FinishReason


@dataclass(frozen=True)
class Progress:
    """One new token of a continuation, as text, which may be empty.

    Attributes:
        index: of the continuation in its request.
        finish_reason: given with the last one.
    """

    index: int
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Failed:
    """The request as a whole has ended without its answer."""

    error: ApiError


Event = Progress | Failed


@dataclass(frozen=True)
class Job:
    """One prompt of a request.

    Attributes:
        number: of the prompt in its request; with the seed it decides the random numbers.
        first_index: number of its first continuation among all of the request.
        ids: tokens, at least one.
        copies: continuations.
        max_new_tokens: fits the model together with ``ids``.
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


@dataclass(eq=False)
class Work:
    """A request: its prompts, and where its events go.

    Attributes:
        deliver: called in the thread of the event loop.
        cancelled: nobody waits for the answer any more; what is under way is dropped at the next step.
    """

    jobs: Sequence[Job]
    deliver: Callable[[Event], None]
    cancelled: bool = False

    @property
    def num_rows(self) -> int:
        return sum(job.copies for job in self.jobs)
