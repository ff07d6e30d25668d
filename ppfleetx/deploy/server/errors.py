"""Errors as OpenAI's interface words them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response


class ApiError(Exception):
    """A request that is not answered as it wished.

    Args:
        status: of the HTTP answer.
        message: what is wrong, and what would be right.
        param: the parameter that is wrong.
        code: a short name for programs.
        headers: of the HTTP answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's class of errors."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        fields = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self) -> JsonResponse:
        return JsonResponse(self.body(), self.status, headers=self.headers)


class JsonResponse(Response):
    """JSON in ASCII: a lone surrogate of a client's text comes back as it was sent."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content).encode("ascii")


def to_json(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A mistake in a request."""
    return ApiError(400, message, param=param, code=code)
