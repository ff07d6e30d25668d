"""A failing model, in a server inside this process."""

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx
import pytest

from ppfleetx.config.loader import load_config
from ppfleetx.deploy.server.answers import EventStream, RequestEvents
from ppfleetx.deploy.server.app import Service
from ppfleetx.deploy.server.completions import CompletionAnswer, CompletionRequest
from ppfleetx.deploy.server.prompts import PromptReader
from ppfleetx.deploy.server.run import _make_server
from ppfleetx.generation.decoding_session import NextTokenModel
from ppfleetx.generation.generator import Generator
from tests.deploy.server.conftest import ENDLESS, error_of
from tests.deploy.server.in_process import Use, serve


class Fragile:
    """A model that raises when it is fed a certain token."""

    def __init__(self, model: NextTokenModel, poison: int) -> None:
        self._model, self._poison = model, poison
        self.vocab_size, self.switch_length = model.vocab_size, model.switch_length
        self.error: BaseException = RuntimeError("the matrix is broken")

    def with_cache(self, tokens, *rest):
        if (tokens == self._poison).any():
            raise self.error
        return self._model.with_cache(tokens, *rest)


POISON = 7


@pytest.fixture
def in_server(served_checkpoint: Path, offline: Generator) -> Callable[[Use], Fragile]:
    """``in_server(use)`` runs a coroutine against a server with a fragile model."""

    def run(use: Use, overrides: Sequence[str] = (), **attributes: object) -> None:
        cfg = load_config(served_checkpoint / "config.yaml", overrides).Serve
        model = Fragile(offline.next_token_model, POISON)
        vars(model).update(attributes)
        serve(offline, cfg, use, model)

    return run


def complete(client: httpx.AsyncClient, **body: object) -> Awaitable[httpx.Response]:
    # The model must not generate the token that it fails on, which depends on the processor's rounding.
    return client.post("/v1/completions", json={"temperature": 0, "logit_bias": {str(POISON): -100}, **body})


def test_a_step_that_fails_fails_its_requests_only(in_server, caplog: pytest.LogCaptureFixture) -> None:
    async def use(client: httpx.AsyncClient, _: Service) -> None:
        beside = asyncio.create_task(complete(client, prompt=[1], max_tokens=8000, min_tokens=8000))
        await asyncio.sleep(0.2)
        answer = await complete(client, prompt=[[POISON], [2]])
        error = error_of(answer, 500)
        assert error["type"] == "server_error"
        assert "see the server's log" in error["message"]
        assert "matrix" not in answer.text, "what went wrong inside is not the client's business"
        assert (await beside).status_code == 500
        assert (await complete(client, prompt=[1], max_tokens=3)).status_code == 200
        assert (await client.get("/health")).status_code == 200

    in_server(use)
    assert "a step of 3 sequences has failed" in caplog.text
    assert "RuntimeError: the matrix is broken" in caplog.text


def test_a_thread_that_dies_makes_the_server_unhealthy(in_server, caplog: pytest.LogCaptureFixture) -> None:
    async def use(client: httpx.AsyncClient, _: Service) -> None:
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert error_of(await complete(client, prompt=[POISON]), 500)["code"] == "model_failed"
        health = await client.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": "unhealthy"}
        assert error_of(await complete(client, prompt=[1]), 503)["code"] == "unhealthy"

    in_server(use, error=SystemExit("the interpreter is going down"))
    assert "the model's thread has failed" in caplog.text


def test_a_defect_of_ours_is_a_500_without_details(
    in_server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def defect(*_: object) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(PromptReader, "of_completion", defect)

    async def use(client: httpx.AsyncClient, service: Service) -> None:
        answer = await complete(client, prompt="a")
        assert error_of(answer, 500)["code"] == "internal"
        assert "secret" not in answer.text
        assert 'ppfleetx_requests_total{status="500"} 1.0' in (await client.get("/metrics")).text

    in_server(use)


def test_a_second_signal_ends_at_the_next_step_what_the_first_let_go_on(in_server) -> None:
    async def use(client: httpx.AsyncClient, service: Service) -> None:
        server = _make_server(service)
        endless = asyncio.create_task(complete(client, prompt=[1], **ENDLESS))
        await asyncio.sleep(0.2)
        server.handle_exit(signal.SIGINT, None)
        assert server.should_exit
        assert error_of(await complete(client, prompt=[1]), 503)["code"] == "shutting_down"
        assert (await client.get("/health")).json() == {"status": "stopping"}
        assert not endless.done()
        server.handle_exit(signal.SIGINT, None)
        assert not server.force_exit, "uvicorn would break off its tasks, with their tracebacks"
        assert (await asyncio.wait_for(endless, 30)).json()["error"]["code"] == "shutting_down"

    in_server(use)


def test_a_client_that_does_not_read_is_given_up(in_server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppfleetx.deploy.server.answers._SEND_GRACE_SECONDS", 0.1)

    async def use(client: httpx.AsyncClient, service: Service) -> None:
        wanted = CompletionRequest(prompt="the cat", stream=True, **ENDLESS)
        prompts = service.prompts.of_completion(wanted)
        never = asyncio.Event()

        async def receive() -> dict:
            await never.wait()
            raise AssertionError("unreachable")

        async def send(message: dict) -> None:
            if message["type"] == "http.response.body":
                await never.wait()

        answering = RequestEvents(service.scheduler, prompts, receive, 0.3, service.metrics)
        named = ("gpt", "cmpl-1")
        answer = CompletionAnswer(wanted, prompts, *named, tokenizer=service.tokenizer, echoes=())
        scope: dict = {}
        await asyncio.wait_for(EventStream(answer, answering, 0.3)(scope, receive, send), 30)
        assert scope["state"]["ended_as"] == 504
        for _ in range(1500):
            if "ppfleetx_sequences_running 0.0" in service.metrics.text().decode():
                return
            await asyncio.sleep(0.02)
        raise AssertionError("its sequence still grows")

    in_server(use)


def test_answers_that_take_too_long(in_server) -> None:
    """One is waited for, the other streamed: what was made came, then the error, and the end."""

    async def use(client: httpx.AsyncClient, service: Service) -> None:
        await complete(client, prompt=[1], max_tokens=1)
        began = time.monotonic()
        whole, stream = await asyncio.gather(
            complete(client, prompt=[1], **ENDLESS), complete(client, prompt=[1], stream=True, **ENDLESS)
        )
        assert 0.9 < time.monotonic() - began < 30
        assert "not finished within 1 s (Serve.request_timeout)" in error_of(whole, 504)["message"]
        assert stream.status_code == 200
        *pieces, error, done = stream.text.removesuffix("\n\n").split("\n\n")
        assert pieces
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout"
        assert done == "data: [DONE]"
        metrics = (await client.get("/metrics")).text
        assert 'ppfleetx_requests_total{status="504"} 2.0' in metrics

    in_server(use, ["Serve.request_timeout=1"])
