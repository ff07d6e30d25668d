"""Common parts of the server's routes: errors in OpenAI's format, sampling parameters, request bodies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json
from starlette.responses import Response

from ppfleetx.config.field_annotations import annotation_at, describe, key_type, members
from ppfleetx.config.sections.generation import StructuredOutputs, TokenOptions


class ApiError(Exception):
    """An error response in OpenAI's format. ``param`` names the parameter, ``code`` the kind of error."""

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
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        fields = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self) -> JsonResponse:
        return JsonResponse(self.body(), self.status, headers=self.headers)


class JsonResponse(Response):
    """A JSON response in ASCII. Other characters are escaped, even a lone surrogate, which UTF-8 cannot
    represent."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content).encode("ascii")


def to_json(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


MOST_TOP = 20
"""The maximum number of alternative tokens that a response lists for each token."""
_MAX_STOPS = 64
_MAX_STOP_LENGTH = 256
_MAX_QUOTED = 64


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("must be a text or a list of texts, none of them empty")
    if len(stops) > _MAX_STOPS or any(len(stop) > _MAX_STOP_LENGTH for stop in stops):
        raise ValueError(f"may be {_MAX_STOPS} texts of at most {_MAX_STOP_LENGTH} characters")
    return tuple(stops)


def _refuse_unless_empty(value: Any) -> None:
    """Raise ValueError for a parameter of OpenAI's API that the server does not support. Values without
    effect, such as 0, are accepted."""
    if value not in (0, {}, "", False, []):  # some clients send these
        raise ValueError("is not supported; leave it out")


NotSupported = Annotated[None, BeforeValidator(_refuse_unless_empty)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: NotSupported = None
    include_obfuscation: NotSupported = None


def _format(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text" and len(value) == 1:
        return None
    if kind == "json_object" and len(value) == 1:
        return {"json_object": True}
    if kind == "json_schema" and isinstance(value.get("json_schema"), dict):
        schema = value["json_schema"].get("schema")
        return {"json_schema": {} if schema is None else schema}
    raise ValueError(
        'must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": '
        '{"name": ..., "schema": {...}}}'
    )


class Request(BaseModel):
    """Base class of request bodies. Unknown parameters are an error."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model: str | None = None


class GenerationRequest(Request, TokenOptions):
    """The parameters that the completion and chat routes have in common. Temperature and penalties have the
    same limits as in OpenAI's API."""

    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    n: int = Field(1, ge=1)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: Annotated[StructuredOutputs | None, BeforeValidator(_format)] = None
    # Accepted for compatibility; these do not change the answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    # Clients of vLLM send these. Values that ask for unsupported behavior are refused.
    skip_special_tokens: Literal[True] = True
    spaces_between_special_tokens: bool = True
    use_beam_search: NotSupported = None

    @model_validator(mode="after")
    def _check(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: needs stream")
        if self.token_limit is not None and self.min_tokens > self.token_limit:
            raise ValueError(f"min_tokens: {self.min_tokens} is more than max_tokens = {self.token_limit}")
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("response_format: cannot be combined with structured_outputs")
        return self

    @property
    def form(self) -> tuple[str, StructuredOutputs | None]:
        """The name and the value of the request parameter that sets the output format. The value None means
        free text."""
        if self.response_format is not None:
            return "response_format", self.response_format
        return "structured_outputs", self.structured_outputs

    @property
    def token_limit(self) -> int | None:
        """The maximum number of new tokens. None: as many as fit into the model's context."""
        raise NotImplementedError

    @property
    def must_have_room(self) -> bool:
        """Whether to refuse the request if ``token_limit`` new tokens do not fit into the model's context.
        True if the client set the limit. If False, fewer tokens are generated."""
        return not self.model_fields_set.isdisjoint(("max_tokens", "max_completion_tokens"))

    @property
    def num_top(self) -> int | None:
        """The number of alternative tokens to list for each token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def candidates(self) -> int:
        """The number of continuations to generate per prompt. Only the best ``n`` of them are returned."""
        return self.n

    @property
    def scores_prompt(self) -> bool:
        return False

    @property
    def needs_scores(self) -> bool:
        return self.num_top is not None or self.candidates > self.n


AnyRequest = TypeVar("AnyRequest", bound=Request)


def read_request(body: bytes, kind: type[AnyRequest]) -> AnyRequest:
    """Parse and validate a request body. A parameter that is null counts as omitted. Raises ApiError 400 if
    the body is invalid; the message names the parameter and the rule."""
    try:
        return kind.model_validate_json(_without_nulls(body))
    except ValidationError as error:
        raise _explain(error, kind) from None


def _without_nulls(body: bytes) -> bytes | str:
    try:
        data = from_json(body)
    except ValueError:  # pydantic reports the mistake
        return body
    if not isinstance(data, dict) or None not in data.values():
        return body
    return json.dumps({key: value for key, value in data.items() if value is not None})


def _explain(error: ValidationError, kind: type[Request]) -> ApiError:
    details = error.errors(include_url=False, include_input=False, include_context=False)
    places = sorted([*map(str, one["loc"])] for one in details if one["type"] == "extra_forbidden")
    if places:
        unknown, known = [".".join(place) for place in places], ", ".join(_fields_at(places[0][:-1], kind))
        names = ", ".join(map(quoted, unknown[:8]))
        return bad_request(
            f"unknown parameter{'s' * (len(unknown) > 1)} {names}; known: {known}",
            param=unknown[0][:_MAX_QUOTED],
            code="unknown_parameter",
        )
    first = details[0]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}")
    if not first["loc"]:
        return bad_request(message, param=message.partition(":")[0] if ": " in message else None)
    if first["loc"][-1] == "[key]":
        *path, key, _ = map(str, first["loc"])
        keys = key_type(annotation_at(kind, path))
        param = ".".join(path)
        return bad_request(f"{param}: each key must be {describe(keys)}, not {quoted(key)}", param=param)
    param = ".".join(map(str, first["loc"]))
    return bad_request(f"{param}: {message[:1].lower()}{message[1:]}", param=param)


def _fields_at(path: list[str], kind: type[BaseModel]) -> list[str]:
    """Return the names of the parameters in the object at ``path`` of a request body."""
    known = kind
    for part in path:
        choices = members(known.model_fields[part].annotation)
        known = next(one for one in choices if isinstance(one, type) and issubclass(one, BaseModel))
    return [".".join([*path, name]) for name in known.model_fields]


def quoted(text: str) -> str:
    """Return a client's string in quotes for an error message. A long string is shortened."""
    return repr(text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}...")
