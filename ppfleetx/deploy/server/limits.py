"""What a request must be before anybody looks into it, and the account of how it ended."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Collection

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ppfleetx.deploy.server.errors import ApiError
from ppfleetx.deploy.server.metrics import Metrics
from ppfleetx.utils.log import get_logger

_BODY_SECONDS = 30.0
_CLOSE = {"Connection": "close"}  # the rest of the body is not read


def check_key(request: Request, api_key: str | None) -> None:
    """Compare the bearer key in a time that does not depend on where it differs.

    Raises:
        ApiError: 401.
    """
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
    """The body of a JSON request.

    Asking for the content type keeps web pages of other origins out: a browser lets them send other types
    without asking us.

    Raises:
        ApiError: 415 not JSON; 413 larger than ``max_bytes``; 408 it does not come; 499 the client left.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, "send the body as JSON, with 'Content-Type: application/json'", headers=_CLOSE)
    too_large = ApiError(
        413,
        f"the body may have {max_bytes} bytes (Serve.max_body_bytes)",
        code="body_too_large",
        headers=_CLOSE,
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {_BODY_SECONDS:g} s", headers=_CLOSE) from None
    except ClientDisconnect:
        raise ApiError(499, "the client has left", code="client_left") from None
    return bytes(body)


class Accounting:
    """Middleware that counts, times and logs the requests to some paths. Texts are never logged."""

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
            # A stream begins with 200, whatever becomes of it.
            self._note(
                scope["path"], scope.get("state", {}).get("ended_as", status), time.monotonic() - started
            )

    def _note(self, path: str, status: int, seconds: float) -> None:
        self._metrics.requests.labels(status=str(status)).inc()
        self._metrics.request_seconds.observe(seconds)
        get_logger().info("%s: %d after %.3f s", path, status, seconds)
