"""Formats of the routes ``/v1/embeddings``, ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from ppfleetx.deploy.server.answers import RequestEvents
from ppfleetx.deploy.server.chat import ChatPrompt
from ppfleetx.deploy.server.completions import Prompt, prompts_of
from ppfleetx.deploy.server.protocol import JsonResponse, NotSupported, Request
from ppfleetx.deploy.server.scheduler_messages import Embedded


class EmbeddingRequest(Request):
    """The body of a ``POST /v1/embeddings`` request."""

    input: Annotated[list[Prompt], BeforeValidator(prompts_of)]
    encoding_format: Literal["float", "base64"] = "float"
    add_special_tokens: bool = True
    dimensions: NotSupported = None
    user: str | None = None


class TokenizeRequest(Request, ChatPrompt):
    """The body of a ``POST /tokenize`` request, as in vLLM: ``prompt``, or the ``messages`` of a chat."""

    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("prompt: give a prompt or messages")
        return self


class DetokenizeRequest(Request):
    """The body of a ``POST /detokenize`` request."""

    tokens: list[Annotated[int, Field(ge=0)]]


async def vectors_of(answering: RequestEvents) -> list[np.ndarray]:
    vectors = {event.prompt_index: event.vector async for event in answering if isinstance(event, Embedded)}
    return [vectors[index] for index in sorted(vectors)]


def embeddings_response(
    request: EmbeddingRequest, vectors: Sequence[np.ndarray], model_name: str, num_tokens: int
) -> JsonResponse:
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, request.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return JsonResponse({"object": "list", "data": data, "model": model_name, "usage": usage})


def _encoded(vector: np.ndarray, encoding: str) -> Any:
    return base64.b64encode(vector.tobytes()).decode() if encoding == "base64" else vector.tolist()
