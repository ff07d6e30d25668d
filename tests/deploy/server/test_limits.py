"""The server's limits, set low."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.deploy.server.conftest import ENDLESS, KEY, Server, error_of


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "a key is needed"),
        ("Bearer", "a key is needed"),
        ("Bearer wrong", "the key is wrong"),
        (f"Bearer {KEY}x", "the key is wrong"),
        (f"Basic {KEY}", "the key is wrong"),
        ("Bearer sch\u00f6n", "the key is wrong"),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics")]
)
def test_without_the_key(
    strict_server: Server, given: str | None, message: str, method: str, path: str
) -> None:
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    answer = httpx.request(method, strict_server.url + path, headers=headers, content=b"x" * 5000)
    assert answer.headers["www-authenticate"] == "Bearer"
    error = error_of(answer, 401)
    assert error["type"] == "authentication_error"
    assert message in error["message"]


def test_the_key_opens(strict_server: Server) -> None:
    client = openai.OpenAI(base_url=f"{strict_server.url}/v1", api_key=KEY)
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.AuthenticationError, match="the key is wrong"):
        client.with_options(api_key="another").models.list()
    assert httpx.get(f"{strict_server.url}/health").status_code == 200, "a supervisor has no key"


def in_chunks() -> Iterator[bytes]:
    for _ in range(50):
        yield b" " * 100


@pytest.mark.parametrize(
    "content", [b" " * 2001, b" " * (8 << 20), in_chunks], ids=["said", "huge", "chunks"]
)
def test_a_body_too_large(strict_server: Server, content) -> None:
    answer = strict_server.http.post(
        "/v1/completions",
        content=content() if callable(content) else content,
        headers={"Content-Type": "application/json"},
    )
    assert "Serve.max_body_bytes" in error_of(answer, 413)["message"]


def test_a_body_that_is_not_said_to_be_json(strict_server: Server) -> None:
    """A web page of another origin may send these without asking."""
    for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = strict_server.http.post(
            "/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": content_type}
        )
        assert "application/json" in error_of(answer, 415)["message"]


def test_a_full_queue(strict_server: Server) -> None:
    """Two sequences grow, one waits, the fourth is refused; when they have left there is room again."""
    with httpx.stream(
        "POST",
        f"{strict_server.url}/v1/completions",
        json={"prompt": ["a", "b", "c"], "stream": True, **ENDLESS},
        headers={"Authorization": f"Bearer {KEY}"},
    ) as stream:
        assert stream.status_code == 200
        assert strict_server.metric("ppfleetx_sequences_running") == 2
        assert strict_server.metric("ppfleetx_sequences_waiting") == 1
        answers = [strict_server.complete(), strict_server.complete(stream=True)]
    for answer in answers:
        assert answer.headers["retry-after"] == "1"
        error = error_of(answer, 429)
        assert error["type"] == "rate_limit_error"
        assert "of at most 3" in error["message"]
    strict_server.wait_for_metric("ppfleetx_sequences_running", 0)
    assert strict_server.metric("ppfleetx_sequences_waiting") == 0
    assert strict_server.complete().status_code == 200


def test_a_client_that_leaves_the_queue(strict_server: Server) -> None:
    """It waits for its first token, and nothing has been sent to it."""
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"{strict_server.url}/v1/completions"
    body = {"prompt": ["a", "b"], "stream": True, **ENDLESS}
    left = strict_server.metric('ppfleetx_requests_total{status="499"}')
    with httpx.stream("POST", url, json=body, headers=headers):
        for is_stream in (False, True):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json={"prompt": "c", "stream": is_stream}, headers=headers, timeout=0.2)
            strict_server.wait_for_metric("ppfleetx_sequences_waiting", 0)
        assert strict_server.metric("ppfleetx_sequences_running") == 2
    strict_server.wait_for_metric('ppfleetx_requests_total{status="499"}', left + 3)
