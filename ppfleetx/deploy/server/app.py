"""The web application: routes, and what they have in common."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ppfleetx.config.sections.root import ServeConfig
from ppfleetx.deploy.server.answering import Answer, Answering, EventStream
from ppfleetx.deploy.server.chat import ChatAnswer, ChatRequest
from ppfleetx.deploy.server.completions import CompletionAnswer, CompletionRequest
from ppfleetx.deploy.server.errors import ApiError, JsonResponse
from ppfleetx.deploy.server.limits import Accounting, check_key, read_json_body
from ppfleetx.deploy.server.logprobs import TokenTexts
from ppfleetx.deploy.server.metrics import Metrics
from ppfleetx.deploy.server.page import page_response
from ppfleetx.deploy.server.prompts import PromptReader
from ppfleetx.deploy.server.protocol import GenerationRequest, model_body, quoted, read_request
from ppfleetx.deploy.server.scheduler import Scheduler
from ppfleetx.utils.log import get_logger

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_THREAD_END_SECONDS = 5.0


@dataclass(frozen=True)
class Service:
    """All that the routes need."""

    cfg: ServeConfig
    api_key: str | None
    prompts: PromptReader
    scheduler: Scheduler
    metrics: Metrics
    texts: TokenTexts
    created: int

    def model(self, name: str) -> dict[str, Any]:
        """What clients are given of the model."""
        return model_body(name, self.created, self.prompts.max_positions)


def create_app(service: Service) -> FastAPI:
    """Routes of the server. Everything but the page and ``/health`` asks for the key, if there is one."""
    app = FastAPI(openapi_url=None, lifespan=_lifespan(service), redirect_slashes=False)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _our_error)
    app.add_middleware(Accounting, paths=(COMPLETIONS, CHAT), metrics=service.metrics)

    def needs_key(request: Request) -> None:
        check_key(request, service.api_key)

    @app.post(COMPLETIONS, dependencies=[Depends(needs_key)])
    async def completions(request: Request) -> Response:
        body = await read_json_body(request, service.cfg.max_body_bytes)
        return await _complete(service, request, read_request(body, CompletionRequest))

    @app.post(CHAT, dependencies=[Depends(needs_key)])
    async def chat(request: Request) -> Response:
        body = await read_json_body(request, service.cfg.max_body_bytes)
        return await _chat(service, request, read_request(body, ChatRequest))

    @app.get("/v1/models", dependencies=[Depends(needs_key)])
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [service.model(service.cfg.model_name)]})

    @app.get("/v1/models/{name:path}", dependencies=[Depends(needs_key)])
    async def one_model(name: str) -> Response:
        _check_model(service, name)
        return JsonResponse(service.model(name))

    @app.get("/metrics", dependencies=[Depends(needs_key)])
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": service.metrics.content_type})

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        return _health(service.scheduler)

    @app.api_route("/", methods=["GET", "HEAD"])
    async def page() -> Response:
        return page_response()

    return app


async def _complete(service: Service, request: Request, wanted: CompletionRequest) -> Response:
    _check_model(service, wanted.model)
    # Tokenizing takes its time and must not hold up the other clients' streams.
    jobs = await asyncio.to_thread(service.prompts.of_completion, wanted)
    answer = CompletionAnswer(
        wanted,
        jobs,
        *_named(service, "cmpl"),
        texts=service.texts,
        echoes=[service.prompts.text(prompt) for prompt in wanted.prompt] if wanted.echo else (),
        end_ids=service.scheduler.end_ids,
    )
    return await _answer(service, request, wanted, answer)


async def _chat(service: Service, request: Request, wanted: ChatRequest) -> Response:
    _check_model(service, wanted.model)
    jobs = await asyncio.to_thread(service.prompts.of_chat, wanted)
    end_ids = service.scheduler.end_ids
    answer = ChatAnswer(wanted, jobs, *_named(service, "chatcmpl"), texts=service.texts, end_ids=end_ids)
    return await _answer(service, request, wanted, answer)


def _named(service: Service, kind: str) -> tuple[str, str, int]:
    """The model's name, and a name and time for an answer."""
    return service.cfg.model_name, f"{kind}-{secrets.token_hex(12)}", int(time.time())


async def _answer(service: Service, request: Request, wanted: GenerationRequest, answer: Answer) -> Response:
    timeout = service.cfg.request_timeout
    answering = Answering(service.scheduler, answer.jobs, request.receive, timeout, service.metrics)
    if wanted.stream:
        return EventStream(answer, answering, timeout)
    async with answering:
        return await answer.whole(answering)


def _check_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.cfg.model_name:
        raise ApiError(
            404,
            f"model: there is no {quoted(name)}; this server has {service.cfg.model_name!r} "
            "(Serve.model_name)",
            param="model",
            code="model_not_found",
        )


def _health(scheduler: Scheduler) -> Response:
    if not scheduler.is_healthy:
        return JsonResponse({"status": "unhealthy"}, 503)
    if scheduler.is_closing:
        return JsonResponse({"status": "stopping"}, 503)
    return JsonResponse({"status": "ok"})


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


async def _our_error(request: Request, error: Exception) -> Response:
    """A defect of ours; the traceback goes to the log."""
    return ApiError(500, "the server has failed on this request; see its log", code="internal").response()
