"""``POST /v1/completions``: from a request's body to the events of the model's thread, and to an answer."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ppfleetx.config.counts import counted
from ppfleetx.config.errors import DataError
from ppfleetx.config.sections.root import ServeConfig
from ppfleetx.deploy.server.errors import ApiError, JsonResponse, bad_request, to_json
from ppfleetx.deploy.server.metrics import Metrics
from ppfleetx.deploy.server.protocol import (
    CompletionRequest,
    Prompt,
    choice,
    completion_body,
    usage_of,
)
from ppfleetx.deploy.server.scheduler import Scheduler
from ppfleetx.deploy.server.work import Event, Failed, Job, Progress, Work
from ppfleetx.generation.continuous import RowOptions
from ppfleetx.generation.generator import Generator
from ppfleetx.utils.log import get_logger

CLIENT_LEFT = 499  # nginx's number; no client ever sees it
_SEND_GRACE_SECONDS = 10.0


class PromptReader:
    """Turns a request's prompts into jobs that fit the model.

    Args:
        generator: its tokenizer and number of positions.
        cfg: whether special tokens are parsed, and the most continuations of one prompt.
        capacity: most continuations of one request.
    """

    def __init__(self, generator: Generator, cfg: ServeConfig, capacity: int) -> None:
        self._tokenizer, self._max_positions = generator.tokenizer, generator.max_positions
        self._cfg, self._max_batch_size, self._capacity = cfg, cfg.max_batch_size, capacity
        vocabulary = range(self._tokenizer.vocab_size)
        self._longest_token = max(len(self._tokenizer.token_bytes(token)) for token in vocabulary)

    def jobs(self, request: CompletionRequest) -> list[Job]:
        """One job per prompt.

        Raises:
            ApiError: 400, what does not fit the model.
        """
        if request.n > self._max_batch_size:
            raise bad_request(
                f"n: {request.n} is more than the {counted(self._max_batch_size, 'sequence')} that may grow "
                "together (Serve.max_batch_size)",
                "n",
            )
        if len(request.prompt) * request.n > self._capacity:  # said before any of them is tokenized
            raise bad_request(
                f"prompt: {counted(len(request.prompt), 'prompt')} x n = {request.n} are more than the "
                f"{counted(self._capacity, 'sequence')} that can be waiting and under way",
                "prompt",
            )
        options = RowOptions(request.temperature, request.top_k, request.top_p, request.repetition_penalty)
        seed = secrets.randbits(63) if request.seed is None else request.seed
        jobs = []
        for number, prompt in enumerate(request.prompt):
            ids = self._encode(prompt, add_special_tokens=request.add_special_tokens)
            jobs.append(
                Job(
                    number=number,
                    first_index=number * request.n,
                    ids=ids,
                    copies=request.n,
                    max_new_tokens=self._max_new_tokens(len(ids), request),
                    min_new_tokens=request.min_tokens,
                    options=options,
                    seed=seed,
                    stops=request.stop,
                )
            )
        return jobs

    def text(self, prompt: Prompt) -> str:
        """A prompt as ``echo`` gives it back."""
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _encode(self, prompt: Prompt, *, add_special_tokens: bool) -> Sequence[int]:
        if not isinstance(prompt, str):
            wrong = [token for token in prompt if not 0 <= token < self._tokenizer.vocab_size]
            if wrong:
                raise bad_request(
                    f"prompt: {wrong[0]} is no token id; they run from 0 to {self._tokenizer.vocab_size - 1}",
                    "prompt",
                )
            return prompt
        # Cheaper than tokenizing a megabyte to find that it is too long. A normalizer may shorten a text.
        at_least = -(-len(prompt.encode("utf-8", "surrogatepass")) // self._longest_token)
        if at_least >= self._max_positions and self._tokenizer.engine_name == "tiktoken":
            raise self._too_long(f"at least {at_least}")
        try:
            ids = self._tokenizer.encode_prompt(
                prompt,
                add_special_tokens=add_special_tokens,
                parse_special_tokens=self._cfg.parse_special_tokens,
            )
        except DataError as error:
            raise bad_request(f"prompt: {error}", "prompt") from error
        if not ids:  # of a tokenizer that drops some characters
            raise bad_request("prompt: has no token: there is nothing to continue", "prompt")
        return ids

    def _max_new_tokens(self, prompt_length: int, request: CompletionRequest) -> int:
        room = self._max_positions - prompt_length
        if room <= 0:
            raise self._too_long(str(prompt_length))
        if (request.max_tokens > room and request.has_max_tokens) or request.min_tokens > room:
            wanted = max(request.max_tokens, request.min_tokens)
            raise bad_request(
                f"max_tokens: a prompt of {counted(prompt_length, 'token')} leaves room for {room} more in "
                f"the model's {self._max_positions} positions, not for {wanted}",
                "max_tokens",
                "context_length_exceeded",
            )
        return min(request.max_tokens, room)

    def _too_long(self, length: str) -> ApiError:
        return bad_request(
            f"prompt: has {length} tokens; with at least one new token, the model's {self._max_positions} "
            f"positions have room for {self._max_positions - 1}",
            "prompt",
            "context_length_exceeded",
        )


class Answering:
    """Context of one request under way: its events, the client's leaving and the time limit in one queue.

    Whatever ends it, the model's thread is told to stop when it has not finished.
    """

    def __init__(
        self, scheduler: Scheduler, jobs: Sequence[Job], receive: Receive, timeout: float, metrics: Metrics
    ) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._work = Work(jobs, self._events.put_nowait)
        self._scheduler, self._receive, self._timeout, self._metrics = scheduler, receive, timeout, metrics
        self._num_left = self._work.num_rows
        self._started = time.monotonic()
        self.num_tokens = 0
        self.status = 200

    async def __aenter__(self) -> Self:
        self._scheduler.submit(self._work)
        loop = asyncio.get_running_loop()
        self._watch = loop.create_task(self._watch_client())
        self._timer = loop.call_later(self._timeout, self._events.put_nowait, Failed(self._late()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        self._timer.cancel()
        if self._num_left:
            self._scheduler.cancel(self._work)

    def __aiter__(self) -> AsyncIterator[Progress]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Progress]:
        """Events until every continuation is finished.

        Raises:
            ApiError: the request ended without its answer.
        """
        while self._num_left:
            event = await self._events.get()
            if isinstance(event, Failed):
                self.status = event.error.status
                raise event.error
            if not self.num_tokens:
                self._metrics.first_token_seconds.observe(time.monotonic() - self._started)
            self.num_tokens += 1
            self._num_left -= event.finish_reason is not None
            yield event

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        left = ApiError(CLIENT_LEFT, "the client has left", code="client_left")
        self._events.put_nowait(Failed(left))

    def _late(self) -> ApiError:
        return ApiError(
            504, f"not finished within {self._timeout:g} s (Serve.request_timeout)", code="timeout"
        )


@dataclass(frozen=True)
class Answer:
    """What every piece of an answer says, and how the pieces look."""

    request: CompletionRequest
    jobs: Sequence[Job]
    model_name: str
    echoes: Sequence[str]
    answer_id: str
    created: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(job.ids) for job in self.jobs)

    def echo(self, index: int) -> str:
        """What stands before continuation ``index``."""
        return self.echoes[index // self.request.n] if self.request.echo else ""

    def body(self, choices: Sequence[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        return completion_body(self.answer_id, self.created, self.model_name, choices, usage)

    def usage(self, num_tokens: int) -> dict[str, int]:
        return usage_of(self.num_prompt_tokens, num_tokens)

    async def whole(self, answering: Answering) -> JsonResponse:
        """All continuations at once."""
        num_rows = len(self.jobs) * self.request.n
        texts = [[self.echo(index)] for index in range(num_rows)]
        reasons: list[Any] = [None] * num_rows
        async for event in answering:
            texts[event.index].append(event.text)
            reasons[event.index] = event.finish_reason
        choices = [choice(i, "".join(texts[i]), reasons[i]) for i in range(num_rows)]
        return JsonResponse(self.body(choices, self.usage(answering.num_tokens)))

    async def pieces(self, answering: Answering) -> AsyncIterator[dict[str, Any]]:
        """Text as it comes, then the reason for the end; at last the usage, if it is wanted."""
        started: set[int] = set()
        async for event in answering:
            text = event.text
            if event.index not in started:
                started.add(event.index)
                text = self.echo(event.index) + text
            if text or event.finish_reason:
                yield self.body([choice(event.index, text, event.finish_reason)])
        options = self.request.stream_options
        if options is not None and options.include_usage:
            yield self.body([], self.usage(answering.num_tokens))


class EventStream(Response):
    """Server-sent events of one answer. It begins with the first piece, so that what goes wrong before has
    a status of its own; what goes wrong later is the last event but one."""

    def __init__(self, answer: Answer, answering: Answering, max_seconds: float) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._answer, self._answering, self._max_seconds = answer, answering, max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._answering:
            pieces = self._answer.pieces(self._answering)
            first = await anext(pieces)
            try:
                # The model's side ends by itself; a client that does not read what it is sent would not.
                async with asyncio.timeout(self._max_seconds + _SEND_GRACE_SECONDS):
                    await self._send_all(first, pieces, send)
            except TimeoutError:
                self._answering.status = 504
                get_logger().warning("%s: the client does not read its answer", self._answer.answer_id)
            finally:
                scope.setdefault("state", {})["ended_as"] = self._answering.status

    async def _send_all(
        self, first: dict[str, Any], pieces: AsyncIterator[dict[str, Any]], send: Send
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send(_event(to_json(first)))
        try:
            async for piece in pieces:
                await send(_event(to_json(piece)))
        except ApiError as error:
            if error.status == CLIENT_LEFT:
                return
            await send(_event(to_json(error.body())))
        await send(_event("[DONE]"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(data: str) -> Message:
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode("ascii"), "more_body": True}
