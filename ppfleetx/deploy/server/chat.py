"""Request and response formats of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from ppfleetx.config.sections.generation import StructuredOutputs
from ppfleetx.deploy.server.answers import Answer, RowAnswer, chat_logprobs, choice_entry
from ppfleetx.deploy.server.protocol import MOST_TOP, GenerationRequest, NotSupported
from ppfleetx.deploy.server.scheduler_messages import NewText
from ppfleetx.deploy.server.tool_calls import (
    AnswerText,
    choice_of,
    forced_form,
    names_of,
    tools_of,
    with_read_arguments,
)
from ppfleetx.generation.sampling import TokenScore

_MAX_MESSAGES = 4096
_RESERVED = {"messages", "add_generation_prompt", "continue_final_message", "tools", "documents"}


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of at least one message")
    if len(value) > _MAX_MESSAGES:
        raise ValueError(f"may be {_MAX_MESSAGES} at most")
    return [_message(one, f"message {number}") for number, one in enumerate(value)]


def _message(value: Any, name: str) -> dict[str, Any]:
    """Check one message of a chat request, and return it in the form that chat templates expect. The parts
    of ``content`` are joined into one string, and the ``arguments`` of tool calls are parsed. Raises
    ValueError if the message is malformed. ``name`` refers to the message in the error, as in ``message 3``.
    """
    if not isinstance(value, dict) or not isinstance(value.get("role"), str) or not value["role"]:
        raise ValueError(f"{name} must be an object with role and content")
    value = with_read_arguments(value)
    content = value.get("content")
    if content is None and value["role"] == "assistant":  # clients send null with tool calls
        return {**value, "content": ""}
    if isinstance(content, list):
        parts = [one.get("text") if _is_text_part(one) else None for one in content]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f'{name} has a content of parts that are not {{"type": "text", "text": "..."}}')
        return {**value, "content": "\n".join(parts)}
    if not isinstance(content, str):
        raise ValueError(f"{name} must have a text as its content, or a list of parts of text")
    return value


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


class ChatPrompt(BaseModel):
    """The fields of a chat request that determine the prompt: messages, tools, and template variables."""

    messages: Annotated[list[dict[str, Any]], BeforeValidator(_messages)] = Field(default_factory=list)
    tools: Annotated[list[dict[str, Any]], BeforeValidator(tools_of)] = Field(default_factory=list)
    tool_choice: Annotated[Any, BeforeValidator(choice_of)] = "auto"
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _check_variables(self) -> ChatPrompt:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: needs add_generation_prompt: false")
        reserved = _RESERVED & {*self.chat_template_kwargs}
        if reserved:
            raise ValueError(f"chat_template_kwargs: {min(reserved)} cannot be set by a request")
        return self

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools

    @property
    def template_variables(self) -> dict[str, Any]:
        """The arguments of `ChatTemplate.render` other than the messages."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {
            "tools": self.offered_tools or None,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            **effort,
            **self.chat_template_kwargs,
        }


class ChatRequest(GenerationRequest, ChatPrompt):
    """The body of a ``POST /v1/chat/completions`` request."""

    messages: Annotated[list[dict[str, Any]], BeforeValidator(_messages)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    parallel_tool_calls: bool = True
    echo: NotSupported = None
    store: NotSupported = None
    modalities: tuple[Literal["text"], ...] | None = None  # some clients send the default

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise ValueError("max_completion_tokens: means the same as max_tokens, but has another value")
        if self.tool_choice not in ("none", "auto") and not self.tools:
            raise ValueError("tool_choice: there are no tools to choose from")
        if self._forced_form is not None and super().form[1] is not None:
            raise ValueError(f"tool_choice: contradicts {super().form[0]}, which sets another format")
        return self

    @property
    def _forced_form(self) -> StructuredOutputs | None:
        return forced_form(self.tools, self.tool_choice, several=self.parallel_tool_calls)

    @property
    def form(self) -> tuple[str, StructuredOutputs | None]:
        forced = self._forced_form
        return super().form if forced is None else ("tool_choice", forced)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class ChatAnswer(Answer):
    """Builds the response to a :class:`ChatRequest`, as a whole or in chunks."""

    object_name, piece_name = "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest, *more: Any, **options: Any) -> None:
        super().__init__(request, *more, **options)
        self._names = names_of(request.offered_tools)
        self._most_calls = None if request.parallel_tool_calls else 1
        self._growing: dict[int, AnswerText] = {}

    def whole_choice(
        self, index: int, prompt_index: int, row: RowAnswer, prompt_scores: Sequence[TokenScore]
    ) -> Any:
        content, calls = "".join(row.texts), []
        if self._names:
            text = AnswerText(self._names, self._most_calls)
            begin = text.feed(content)
            rest, calls = text.finish()
            content = begin + rest
        message = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        reason = "tool_calls" if calls else row.reason
        return choice_entry(index, {"message": message}, self._scores(row.scores), reason, row.stop_reason)

    def opening(self, index: int, prompt_scores: Sequence[TokenScore]) -> Any | None:
        return choice_entry(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def piece(self, event: NewText) -> Any | None:
        logprobs = self._scores([] if event.score is None else [event.score])
        if not (event.text or event.finish_reason or (logprobs and logprobs["content"])):
            return None
        text, calls = event.text, []
        if self._names:
            growing = self._growing.setdefault(event.index, AnswerText(self._names, self._most_calls))
            text = growing.feed(text)
            if event.finish_reason is not None:
                rest, calls = growing.finish()
                text += rest
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": number, **one} for number, one in enumerate(calls)]
        reason = "tool_calls" if calls else event.finish_reason
        return choice_entry(event.index, {"delta": delta}, logprobs, reason, event.stop_reason)

    def _scores(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if self.request.num_top is None:
            return None
        return chat_logprobs(self.tokenizer, self.without_end(scores))
