"""Requests and answers of ``/v1/completions``, and the rules of what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ppfleetx.deploy.server.errors import ApiError, bad_request
from ppfleetx.generation.search import FinishReason

DEFAULT_MAX_TOKENS = 16
_MAX_STOPS = 4
_MAX_STOP_LENGTH = 256
_MAX_QUOTED = 64

Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """One prompt or a list of them, each a text or token ids, as a list."""
    if isinstance(value, str) or _is_list_of_ids(value):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(p, str) or _is_list_of_ids(p) for p in value):
        raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")
    if not value or not all(value):
        raise ValueError("is empty: there is nothing to continue")
    return value


def _is_list_of_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("must be a text or a list of texts, none of them empty")
    if len(stops) > _MAX_STOPS or any(len(stop) > _MAX_STOP_LENGTH for stop in stops):
        raise ValueError(f"may be {_MAX_STOPS} texts of at most {_MAX_STOP_LENGTH} characters")
    return tuple(stops)


def _nothing(value: Any) -> None:
    """For parameters of OpenAI's interface that are not supported: clients may send what changes nothing."""
    if value not in (0, {}, "", False):
        raise ValueError("is not supported; leave it out")


def _no_logprobs(value: Any) -> None:
    if value is not False:  # 0 asks for the probability of the chosen token
        raise ValueError("is not supported; leave it out")


def _one(value: Any) -> None:
    if value != 1:
        raise ValueError("is not supported; leave it out, and use n for several continuations")


NotSupported = Annotated[None, BeforeValidator(_nothing)]


class StreamOptions(BaseModel):
    """What a stream holds beside text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """Body of ``POST /v1/completions``. A parameter that is null counts as left out."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model: str | None = None
    prompt: Annotated[list[Prompt], BeforeValidator(_prompts)]
    max_tokens: int = Field(DEFAULT_MAX_TOKENS, ge=1)
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=0)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, allow_inf_nan=False)
    n: int = Field(1, ge=1)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    add_special_tokens: bool = True
    user: str | None = None  # tells the operator who asks, and changes no answer
    best_of: Annotated[None, BeforeValidator(_one)] = None
    frequency_penalty: NotSupported = None
    presence_penalty: NotSupported = None
    logit_bias: NotSupported = None
    logprobs: Annotated[None, BeforeValidator(_no_logprobs)] = None
    suffix: NotSupported = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: needs stream")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: {self.min_tokens} is more than max_tokens = {self.max_tokens}")
        return self

    @property
    def has_max_tokens(self) -> bool:
        return "max_tokens" in self.model_fields_set


def read_request(body: bytes) -> CompletionRequest:
    """The request in a body.

    Raises:
        ApiError: 400, naming the parameter and the rule.
    """
    try:
        return CompletionRequest.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> ApiError:
    details = error.errors(include_url=False, include_input=False, include_context=False)
    unknown = sorted(str(one["loc"][-1]) for one in details if one["type"] == "extra_forbidden")
    if unknown:
        names, known = ", ".join(map(quoted, unknown[:8])), ", ".join(CompletionRequest.model_fields)
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
    param = ".".join(map(str, first["loc"]))
    return bad_request(f"{param}: {message[:1].lower()}{message[1:]}", param=param)


def quoted(text: str) -> str:
    """A client's text as a message quotes it; it may be as long as the body."""
    return repr(text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}...")


def completion_body(
    answer_id: str,
    created: int,
    model: str,
    choices: Sequence[dict[str, Any]],
    usage: dict[str, int] | None = None,
) -> dict[str, Any]:
    """An answer, or one piece of a streamed one."""
    body: dict[str, Any] = {
        "id": answer_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": list(choices),
    }
    return body if usage is None else {**body, "usage": usage}


def choice(index: int, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def model_body(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "ppfleetx"}
