"""Build the response to a request from its events, as a whole or as a stream."""

from __future__ import annotations

import asyncio
import codecs
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.deploy.server.metrics import Metrics
from ppfleetx.deploy.server.protocol import ApiError, GenerationRequest, JsonResponse, to_json
from ppfleetx.deploy.server.scheduler import Scheduler
from ppfleetx.deploy.server.scheduler_messages import (
    Embedded,
    Event,
    Failed,
    NewText,
    PromptRequest,
    Scored,
    Work,
)
from ppfleetx.generation.decode_loop import FinishReason
from ppfleetx.generation.sampling import TokenScore
from ppfleetx.generation.text_io import StopReason, text_bytes
from ppfleetx.utils.log import get_logger

_LOWEST = -9999.0
"""The log-probability that stands for minus infinity, which JSON cannot represent. OpenAI's API uses the same
number."""


def token_text(tokenizer: Tokenizer, token: int) -> str:
    r"""Return a token's text for lists of log-probabilities. If the token's bytes are not valid UTF-8, return
    them as text like ``bytes:\xe2\x82``, as in OpenAI's API.
    """
    value = text_bytes(tokenizer, token)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in value)


class TextLogprobs:
    """Builds the ``logprobs`` object of one completion or, in a stream, of each chunk. Text offsets are in
    characters, and continue from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._offset = tokenizer, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        offsets = []
        for score in scores:
            offsets.append(self._offset)
            # Offsets also count a BOS token, which is not in the text.
            self._offset += len(self._decoder.decode(text_bytes(self._tokenizer, score.token)))
        return {
            "tokens": [token_text(self._tokenizer, score.token) for score in scores],
            "token_logprobs": [_number(score.logprob) for score in scores],
            "top_logprobs": [self._top(score) for score in scores],
            "text_offset": offsets,
        }

    def _top(self, score: TokenScore) -> dict[str, float | None] | None:
        if score.logprob is None:
            return None
        top = {token_text(self._tokenizer, token): _number(logprob) for token, logprob in score.top}
        return {**top, token_text(self._tokenizer, score.token): _number(score.logprob)}


def chat_logprobs(tokenizer: Tokenizer, scores: Sequence[TokenScore]) -> dict[str, Any]:
    content = [
        {
            **_entry(tokenizer, score.token, score.logprob),
            "top_logprobs": [_entry(tokenizer, token, logprob) for token, logprob in score.top],
        }
        for score in scores
    ]
    return {"content": content, "refusal": None}


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    text, value = token_text(tokenizer, token), list(text_bytes(tokenizer, token))
    return {"token": text, "logprob": _number(logprob), "bytes": value}


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LOWEST)


CLIENT_LEFT = 499  # as in nginx; only for logs and metrics
_SEND_GRACE_SECONDS = 10.0


class RequestEvents:
    """Runs one request on the scheduler. Use it as an async context manager, and iterate over it to get the
    events. Leaving the context cancels an unfinished request."""

    def __init__(
        self,
        scheduler: Scheduler,
        prompts: Sequence[PromptRequest],
        receive: Receive,
        timeout: float,
        metrics: Metrics,
    ) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._work = Work(prompts, self._events.put_nowait)
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

    async def __aiter__(self) -> AsyncIterator[NewText | Scored | Embedded]:
        """Yield the request's events until all its continuations are finished. Raises ApiError if the request
        fails or exceeds its time limit, or if the client disconnects."""
        while self._num_left:
            event = await self._events.get()
            if isinstance(event, Failed):
                self.status = event.error.status
                raise event.error
            if isinstance(event, Scored | Embedded):
                yield event
                continue
            if not self.num_tokens:
                self._metrics.first_token_seconds.observe(time.monotonic() - self._started)
            self.num_tokens += event.num_tokens
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


@dataclass
class RowAnswer:
    """The text and token log-probabilities of one continuation so far. ``scores`` includes the end token,
    which is not in the text."""

    texts: list[str] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_reason: StopReason = None

    def add(self, event: NewText) -> None:
        self.texts.append(event.text)
        self.reason, self.stop_reason = event.finish_reason, event.stop_reason
        if event.score is not None:
            self.scores.append(event.score)

    @property
    def mean_logprob(self) -> float:
        known = [score.logprob for score in self.scores if score.logprob is not None]
        return sum(known) / len(known) if known else 0.0


def choice_entry(
    index: int,
    content: Mapping[str, Any],
    logprobs: Any,
    reason: FinishReason | str | None = None,
    stop_reason: StopReason = None,
) -> dict[str, Any]:
    """Return an entry of a response's ``choices``. ``content`` is its text, message or delta by the name of
    the field."""
    return {
        "index": index,
        **content,
        "logprobs": logprobs,
        "finish_reason": reason,
        "stop_reason": stop_reason,
    }


class Answer(ABC):
    """Base class that builds the response to a request, as a whole or in chunks. Tokens that end a
    continuation are left out of the lists of log-probabilities if they are left out of the text."""

    object_name: str
    piece_name: str

    def __init__(
        self,
        request: GenerationRequest,
        prompts: Sequence[PromptRequest],
        model_name: str,
        answer_id: str,
        *,
        tokenizer: Tokenizer,
    ) -> None:
        self.request, self.prompts, self.model_name = request, prompts, model_name
        self.answer_id, self.created = answer_id, int(time.time())
        self.tokenizer = tokenizer
        ends = prompts[0].end_ids.keys()  # all prompts have the same
        self._hidden = ends & tokenizer.special_ids if request.include_stop_str_in_output else ends

    @abstractmethod
    def whole_choice(
        self, index: int, prompt_index: int, row: RowAnswer, prompt_scores: Sequence[TokenScore]
    ) -> Any:
        """Build an entry of the response's ``choices``.

        Args:
            index: index of the entry.
            prompt_index: index of the prompt in the request.
            row: the generated continuation.
            prompt_scores: log-probabilities of the prompt's tokens.
        """

    @abstractmethod
    def opening(self, index: int, prompt_scores: Sequence[TokenScore]) -> Any | None:
        """Build the chunk that a stream sends before the first token of choice ``index``, for example an
        echo of the prompt. Returns None if nothing is sent before the first token."""

    @abstractmethod
    def piece(self, event: NewText) -> Any | None:
        """Build the chunk of a stream for a new token. Returns None if there is nothing to send yet, for
        example because a UTF-8 character is incomplete."""

    def body(self, choices: Sequence[Any], usage: Any = None, *, is_piece: bool) -> dict[str, Any]:
        """Build the JSON body around ``choices``, for a whole response or, with ``is_piece``, for a chunk of
        a stream."""
        body: dict[str, Any] = {
            "id": self.answer_id,
            "object": self.piece_name if is_piece else self.object_name,
            "created": self.created,
            "model": self.model_name,
            "choices": list(choices),
        }
        return body if usage is None else {**body, "usage": usage}

    def usage(self, num_tokens: int) -> dict[str, int]:
        num_prompt_tokens = sum(len(prompt.ids) for prompt in self.prompts)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        }

    def without_end(self, scores: Sequence[TokenScore]) -> list[TokenScore]:
        return [one for one in scores if one.token not in self._hidden]

    async def whole(self, answering: RequestEvents) -> JsonResponse:
        """Wait until all continuations are finished, and build the response. With ``best_of``, more
        continuations are generated than requested, and only those with the highest mean log-probability are
        returned."""
        made, wanted = self.request.candidates, self.request.n
        rows = [RowAnswer() for _ in range(len(self.prompts) * made)]
        prompt_scores: dict[int, Sequence[TokenScore]] = {}
        async for event in answering:
            if isinstance(event, Scored):
                prompt_scores[event.prompt_index] = event.scores
            else:
                rows[event.index].add(event)
        choices = []
        for prompt_index in range(len(self.prompts)):
            own = rows[prompt_index * made : (prompt_index + 1) * made]
            if made > wanted:
                own = sorted(own, key=lambda row: row.mean_logprob, reverse=True)[:wanted]
            for row in own:
                scores = prompt_scores.get(prompt_index, ())
                choices.append(self.whole_choice(len(choices), prompt_index, row, scores))
        return JsonResponse(self.body(choices, self.usage(answering.num_tokens), is_piece=False))

    async def pieces(self, answering: RequestEvents) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a stream as tokens are generated. If the client asked for token usage, the last
        chunk contains it."""
        options = self.request.stream_options
        with_usage = options is not None and options.include_usage
        unknown = {"usage": None} if with_usage else {}  # in earlier chunks, as in OpenAI's API
        started: set[int] = set()
        prompt_scores: dict[int, Sequence[TokenScore]] = {}
        async for event in answering:
            if isinstance(event, Scored):
                prompt_scores[event.prompt_index] = event.scores
                continue
            said = []
            if event.index not in started:
                started.add(event.index)
                scores = prompt_scores.get(event.index // self.request.candidates, ())
                said.append(self.opening(event.index, scores))
            said.append(self.piece(event))
            for choice in said:
                if choice is not None:
                    yield self.body([choice], is_piece=True) | unknown
        if with_usage:
            yield self.body([], self.usage(answering.num_tokens), is_piece=True)


class EventStream(Response):
    """A streaming HTTP response that sends an answer as server-sent events. An error before the first chunk
    is sent as a normal error response. A later error is sent as an event."""

    def __init__(self, answer: Answer, answering: RequestEvents, max_seconds: float) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._answer, self._answering, self._max_seconds = answer, answering, max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._answering:
            pieces = self._answer.pieces(self._answering)
            # Headers are sent with the first chunk, so that an earlier error becomes a normal error response.
            first = await anext(pieces)
            try:
                # The scheduler has its own time limit, but a client that does not read would block forever.
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
