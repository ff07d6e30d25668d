"""Tool calling: the functions that a chat request offers to the model, and the calls in the model's answer.

A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as in Hermes, Qwen and SmolLM. As in
Llama, the whole answer may also be such a JSON object or a list of them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Sequence
from typing import Any

from pydantic_core import from_json  # limits the nesting depth

from ppfleetx.config.sections.generation import StructuredOutputs

_OPEN = "<tool_call>"
_CALL = re.compile(rf"{_OPEN}\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def tools_of(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(_name_of(one) for one in value):
        raise ValueError(
            'must be a list of {"type": "function", "function": {"name": ..., "parameters": ...}}'
        )
    wrong = next((one for one in value if not isinstance(_parameters_of(one), dict)), None)
    if wrong is not None:
        raise ValueError(f"the parameters of {_name_of(wrong)} must be a JSON schema (an object)")
    return value


def choice_of(value: Any) -> str | dict[str, Any]:
    if value in ("none", "auto", "required") or _name_of(value):
        return value
    raise ValueError('must be none, auto, required or {"type": "function", "function": {"name": ...}}')


def _name_of(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _parameters_of(tool: dict[str, Any]) -> Any:
    """Return the JSON schema of a tool's arguments. As in OpenAI's API, a tool without one has none."""
    given = tool["function"].get("parameters")
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    return nothing if given in (None, {}) else given


def names_of(tools: Sequence[dict[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def forced_form(
    tools: Sequence[dict[str, Any]], choice: str | dict[str, Any], *, several: bool
) -> StructuredOutputs | None:
    """Return the output format that a request's ``tool_choice`` (``choice``) requires: a JSON list of calls
    of ``tools``. Returns None for ``"none"`` and ``"auto"``, which require no call. With ``several``,
    ``"required"`` allows more than one call. Raises ValueError if ``choice`` names an unknown tool."""
    if choice in ("none", "auto"):
        return None
    allowed = [one for one in tools if choice == "required" or _name_of(one) == _name_of(choice)]
    if not allowed:
        raise ValueError("tool_choice: names a tool that is not in tools")
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": one["function"]["name"]},
                # Because of this $id, a reference such as #/$defs/Address is looked up in this schema. An $id
                # from the client could be the same for several tools.
                "arguments": {**_parameters_of(one), "$id": f"tool-{number}"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, one in enumerate(allowed)
    ]
    most = {} if several and choice == "required" else {"maxItems": 1}
    return StructuredOutputs(json_schema={"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most})


def with_read_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a chat message with the arguments of its ``tool_calls`` parsed. Clients send arguments as JSON
    strings, but chat templates expect objects. Raises ValueError if the calls are malformed."""
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if not isinstance(calls, list) or not all(_name_of(one) for one in calls):
        raise ValueError('tool_calls must be a list of {"type": "function", "function": {"name": ..., ...}}')
    read = []
    for call in calls:
        arguments = call["function"].get("arguments") or "{}"
        if isinstance(arguments, str):
            try:
                arguments = from_json(arguments)
            except ValueError as error:
                raise ValueError(f"tool_calls: arguments are not JSON: {error}") from error
        read.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": read}


class AnswerText:
    """Separates the text of a model's answer from its tool calls, while the answer is generated.

    Args:
        names: the tools that may be called. An answer that calls any other tool counts as text.
        most: maximum number of calls to return; None: no limit.
    """

    def __init__(self, names: Collection[str], most: int | None) -> None:
        self._names, self._most = names, most
        self._text, self._num_sent = "", 0

    def feed(self, piece: str) -> str:
        """Add the next piece of the answer. Returns the text that can be sent now: the part that certainly
        does not belong to a tool call."""
        self._text += piece
        sure = self._text[self._num_sent : self._sure_length()]
        self._num_sent += len(sure)
        return sure

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """End the answer. Returns the text that :meth:`feed` has not returned yet, up to the first tool
        call if there is one, and the calls in OpenAI's format."""
        begin, calls = self._calls()
        content = self._text[: begin if calls else None]
        return content[self._num_sent :], calls

    def _sure_length(self) -> int:
        stripped = self._text.lstrip()
        if not stripped or stripped[0] in "{[":
            return 0
        if _OPEN in self._text:
            return self._text.index(_OPEN)
        held = next((size for size in range(len(_OPEN) - 1, 0, -1) if self._text.endswith(_OPEN[:size])), 0)
        return len(self._text) - held

    def _calls(self) -> tuple[int, list[dict[str, Any]]]:
        """Parse the tool calls in the whole answer. Returns the index of the first call in the text, and the
        calls in OpenAI's format. The list of calls is empty if any call is malformed or calls an unknown
        tool."""
        blocks = [found.group(1) for found in _CALL.finditer(self._text)]
        begin = self._text.index(_OPEN) if blocks else 0
        calls: list[dict[str, Any]] = []
        for block in blocks or [self._text]:
            try:
                said = from_json(block)
            except ValueError:
                return begin, []
            for one in said if isinstance(said, list) else [said]:
                if not isinstance(one, dict) or one.get("name") not in self._names:
                    return begin, []
                calls.append(_call(one["name"], one.get("arguments", one.get("parameters", {}))))
        return begin, calls[: self._most]


def _call(name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": text},
    }
