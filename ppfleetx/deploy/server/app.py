"""The web application of the server: routes, access checks, request logging, and the chat page."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ppfleetx.config.sections.root import ServeConfig
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.deploy.server.answers import Answer, EventStream, RequestEvents, token_text
from ppfleetx.deploy.server.chat import ChatAnswer, ChatRequest
from ppfleetx.deploy.server.completions import CompletionAnswer, CompletionRequest
from ppfleetx.deploy.server.embeddings import (
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    embeddings_response,
    vectors_of,
)
from ppfleetx.deploy.server.metrics import Metrics
from ppfleetx.deploy.server.prompts import PromptReader
from ppfleetx.deploy.server.protocol import (
    AnyRequest,
    ApiError,
    GenerationRequest,
    JsonResponse,
    quoted,
    read_request,
)
from ppfleetx.deploy.server.scheduler import Scheduler
from ppfleetx.deploy.server.scheduler_messages import PromptRequest
from ppfleetx.utils.log import get_logger

_BODY_SECONDS = 30.0
_CLOSE = {"Connection": "close"}  # the rest of the body is not read


def check_key(request: Request, api_key: str | None) -> None:
    """Raise ApiError 401 unless the request's bearer token equals ``api_key``. The comparison takes
    constant time. Does nothing if ``api_key`` is None."""
    if api_key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    is_right = hmac.compare_digest(given.strip().encode(), api_key.encode())
    if scheme.lower() != "bearer" or not is_right:
        raise ApiError(
            401,
            "a key is needed: send it as 'Authorization: Bearer KEY'" if not given else "the key is wrong",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer", **_CLOSE},
        )


async def read_json_body(request: Request, max_bytes: int) -> bytes:
    """Read the body of a request, which must have the content type ``application/json``.

    Raises:
        ApiError: 415 if the type is not JSON, 413 if the body is larger than ``max_bytes``, 408 if it did not
            arrive in time, and 499 if the client disconnected.
    """
    # Browsers let web pages of other origins send this type only after a CORS preflight.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, "send the body as JSON, with 'Content-Type: application/json'", headers=_CLOSE)
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise ApiError(
                        413,
                        f"the body is larger than {max_bytes} bytes (Serve.max_body_bytes)",
                        code="body_too_large",
                        headers=_CLOSE,
                    )
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_BODY_SECONDS:g} s", headers=_CLOSE) from None
    except ClientDisconnect:
        raise ApiError(499, "the client has left", code="client_left") from None
    return bytes(body)


class Accounting:
    """Middleware that counts, times and logs requests to ``paths``, without prompts or generated text."""

    def __init__(self, app: ASGIApp, paths: Collection[str], metrics: Metrics) -> None:
        self._app, self._paths, self._metrics = app, paths, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            # A stream starts with status 200 even if it fails later; ended_as is its real status.
            status, seconds = scope.get("state", {}).get("ended_as", status), time.monotonic() - started
            self._metrics.requests.labels(status=str(status)).inc()
            self._metrics.request_seconds.observe(seconds)
            get_logger().info("%s: %d after %.3f s", scope["path"], status, seconds)


_FILE = Path(__file__).with_name("page.html")


def page_response() -> Response:
    """Return the chat page. Its content security policy allows only its own script and style, and requests
    to this server."""
    html, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(html, headers=headers)


@cache
def _page() -> tuple[str, str]:
    html = _FILE.read_text(encoding="utf-8")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash_of('script', html)}",
            f"style-src {_hash_of('style', html)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    return html, policy


def _hash_of(element: str, html: str) -> str:
    found = re.search(f"<{element}>(.*?)</{element}>", html, re.DOTALL)
    assert found, f"the page has one <{element}>"
    digest = hashlib.sha256(found.group(1).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
_THREAD_END_SECONDS = 5.0


@dataclass(frozen=True)
class Service:
    cfg: ServeConfig
    api_key: str | None
    prompts: PromptReader
    scheduler: Scheduler
    metrics: Metrics
    tokenizer: Tokenizer
    created: int

    @property
    def models(self) -> tuple[str, ...]:
        """The names that a request can give as ``model``: the base model's, and those of the LoRA
        adapters."""
        return (self.cfg.model_name, *self.cfg.adapters)

    def model(self, name: str) -> dict[str, Any]:
        """Describe the model with this name in OpenAI's format."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "ppfleetx",
            "max_model_len": self.prompts.max_positions,
        }


def create_app(service: Service) -> FastAPI:
    """Create the web application. If the service has an API key, requests without it can only read the chat
    page and ``/health``."""
    app = FastAPI(openapi_url=None, lifespan=_lifespan(service), redirect_slashes=False)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    app.add_middleware(Accounting, paths=(COMPLETIONS, CHAT, EMBEDDINGS), metrics=service.metrics)
    if service.cfg.allowed_origins:
        origins = list(service.cfg.allowed_origins)
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )

    def needs_key(request: Request) -> None:
        check_key(request, service.api_key)

    async def read(request: Request, kind: type[AnyRequest]) -> AnyRequest:
        wanted = read_request(await read_json_body(request, service.cfg.max_body_bytes), kind)
        _check_model(service, wanted.model)
        return wanted

    @app.post(COMPLETIONS, dependencies=[Depends(needs_key)])
    async def completions(request: Request) -> Response:
        return await _complete(service, request, await read(request, CompletionRequest))

    @app.post(CHAT, dependencies=[Depends(needs_key)])
    async def chat(request: Request) -> Response:
        return await _chat(service, request, await read(request, ChatRequest))

    @app.post(EMBEDDINGS, dependencies=[Depends(needs_key)])
    async def embeddings(request: Request) -> Response:
        return await _embed(service, request, await read(request, EmbeddingRequest))

    @app.post("/tokenize", dependencies=[Depends(needs_key)])
    async def tokenize(request: Request) -> Response:
        return await _tokenize(service, await read(request, TokenizeRequest))

    @app.post("/detokenize", dependencies=[Depends(needs_key)])
    async def detokenize(request: Request) -> Response:
        wanted = await read(request, DetokenizeRequest)
        return JsonResponse({"prompt": service.prompts.text(service.prompts.checked(wanted.tokens))})

    @app.get("/v1/models", dependencies=[Depends(needs_key)])
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [service.model(name) for name in service.models]})

    @app.get("/v1/models/{name:path}", dependencies=[Depends(needs_key)])
    async def one_model(name: str) -> Response:
        _check_model(service, name)
        return JsonResponse(service.model(name))

    @app.get("/metrics", dependencies=[Depends(needs_key)])
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": service.metrics.content_type})

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        if not service.scheduler.is_healthy:
            return JsonResponse({"status": "unhealthy"}, 503)
        if service.scheduler.is_closing:
            return JsonResponse({"status": "stopping"}, 503)
        return JsonResponse({"status": "ok"})

    @app.api_route("/", methods=["GET", "HEAD"])
    async def page() -> Response:
        return page_response()

    return app


async def _complete(service: Service, request: Request, wanted: CompletionRequest) -> Response:
    # In a thread, because tokenizing can be slow and would block other clients' streams.
    prompts = await asyncio.to_thread(service.prompts.of_completion, wanted)
    echoes = [service.prompts.text(prompt) for prompt in wanted.prompt] if wanted.echo else ()
    return await _answer(service, request, wanted, prompts, partial(CompletionAnswer, echoes=echoes), "cmpl")


async def _chat(service: Service, request: Request, wanted: ChatRequest) -> Response:
    prompts = await asyncio.to_thread(service.prompts.of_chat, wanted)
    return await _answer(service, request, wanted, prompts, ChatAnswer, "chatcmpl")


async def _embed(service: Service, request: Request, wanted: EmbeddingRequest) -> Response:
    prompts = await asyncio.to_thread(service.prompts.of_embedding, wanted)
    timeout, size = service.cfg.request_timeout, service.cfg.max_batch_size
    vectors: list[np.ndarray] = []
    for start in range(0, len(prompts), size):  # a request may have more inputs than the queue has room for
        part = prompts[start : start + size]
        async with RequestEvents(
            service.scheduler, part, request.receive, timeout, service.metrics
        ) as answering:
            vectors += await vectors_of(answering)
    num_tokens = sum(len(prompt.ids) for prompt in prompts)
    return embeddings_response(wanted, vectors, wanted.model or service.cfg.model_name, num_tokens)


async def _tokenize(service: Service, wanted: TokenizeRequest) -> Response:
    ids = await asyncio.to_thread(service.prompts.token_ids, wanted)
    body = {"count": len(ids), "max_model_len": service.prompts.max_positions, "tokens": ids}
    if wanted.return_token_strs:
        body["token_strs"] = [token_text(service.tokenizer, one) for one in ids]
    return JsonResponse(body)


async def _answer(
    service: Service,
    request: Request,
    wanted: GenerationRequest,
    prompts: Sequence[PromptRequest],
    new_answer: Callable[..., Answer],
    kind: str,
) -> Response:
    timeout = service.cfg.request_timeout
    answer = new_answer(
        wanted,
        prompts,
        wanted.model or service.cfg.model_name,
        f"{kind}-{secrets.token_hex(12)}",
        tokenizer=service.tokenizer,
    )
    answering = RequestEvents(service.scheduler, prompts, request.receive, timeout, service.metrics)
    if wanted.stream:
        return EventStream(answer, answering, timeout)
    async with answering:
        return await answer.whole(answering)


def _check_model(service: Service, name: str | None) -> None:
    if name is not None and name not in service.models:
        raise ApiError(
            404,
            f"model: there is no {quoted(name)}; this server has {', '.join(map(repr, service.models))} "
            "(Serve.model_name, Serve.adapters)",
            param="model",
            code="model_not_found",
        )


def _lifespan(service: Service) -> contextlib.AbstractContextManager:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.scheduler.start(asyncio.get_running_loop())
        try:
            yield
        finally:
            service.scheduler.close(0)
            if not await asyncio.to_thread(service.scheduler.join, _THREAD_END_SECONDS):
                get_logger().warning("the model's thread is still in a step; it ends with the process")

    return lifespan


async def _api_error(request: Request, error: ApiError) -> Response:
    return error.response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    where = f"{request.method} {request.url.path}"
    words = {404: f"there is no {where}", 405: f"{where} is not allowed"}
    message = words.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _internal_error(request: Request, error: Exception) -> Response:
    """Respond with status 500 to an unexpected exception. The web server logs the traceback."""
    return ApiError(500, "the server has failed on this request; see its log", code="internal").response()
