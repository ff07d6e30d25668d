"""Read conversations of finetuning files. All forms become ``{"messages": [...], "tools": ...}``. The forms
are:

- ``{"messages": [{"role": ..., "content": ...}, ...]}``,
- ``{"prompt": [...], "completion": [...]}``, both lists of such messages; only the completion is learned,
- ShareGPT's ``{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}``,
- Alpaca's ``{"instruction": ..., "input": ..., "output": ...}``, with earlier turns in ``history``.

Each can also have ``tools`` (a list, or its JSON text) and ``system``, the system message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ppfleetx.config.errors import DataError, shown
from ppfleetx.data.chat.templates import ASSISTANT
from ppfleetx.data.text_files import load_object, refuse_surrogates

if TYPE_CHECKING:
    from ppfleetx.data.chat.templates import Message

MESSAGES = "messages"
SYSTEM_ROLES = ("system", "developer")
_SHAREGPT, _ALPACA, _PARTS = "conversations", ("instruction", "output"), ("prompt", "completion")
_CALL = "function_call"
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", ASSISTANT, "model", "bing", "bard", _CALL), ASSISTANT),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
_LEARNED = ("weight", "train", "training")


def is_conversation(record: Mapping[str, Any]) -> bool:
    in_parts = all(isinstance(record.get(field), list) for field in _PARTS)
    return MESSAGES in record or _SHAREGPT in record or all(field in record for field in _ALPACA) or in_parts


def is_learned(message: Message) -> bool:
    """Whether a message counts in the loss: the assistant's do, except those with ``"weight": 0`` (OpenAI) or
    ``"train": false`` (axolotl)."""
    return message["role"] == ASSISTANT and all(message.get(key) not in (0, False) for key in _LEARNED)


def read_conversation(line: bytes, place: str) -> dict[str, Any]:
    """Parse one line of a JSON Lines file, which must contain a conversation in any of the supported forms.
    Returns the conversation in the form with ``messages``. Raises DataError if the line is not a
    conversation, or if it has no message to learn. ``place`` is the file and line, for messages."""
    wanted = f'"{MESSAGES}", with "{_SHAREGPT}" (ShareGPT), or with "instruction" and "output" (Alpaca)'
    record = load_object(line, place, wanted)
    if not is_conversation(record):
        raise DataError(f"{place}: must be an object with {wanted}{_other_dataset(record)}")
    messages = _messages_of(record, place)
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{place}: has no list of messages")
    messages = [_checked(message, number, place) for number, message in enumerate(messages)]
    if (system := record.get("system")) and messages[0]["role"] not in SYSTEM_ROLES:
        messages = [_checked({"role": "system", "content": system}, "system", place), *messages]
    if not any(message["role"] == ASSISTANT for message in messages):
        raise DataError(f"{place}: has no message of the role assistant, so there is nothing to learn")
    if not any(map(is_learned, messages)):
        raise DataError(f"{place}: all messages of the assistant have weight 0, so there is nothing to learn")
    return {**record, MESSAGES: messages, "tools": _tools_of(record, place)}


def _other_dataset(record: Mapping[str, Any]) -> str:
    texts = [shown(key) for key, value in record.items() if isinstance(value, str)]
    if "text" in record:
        return ". ppfleetx prepare makes a corpus of plain texts, for GPTDataset"
    if len(texts) < 2:
        return ""
    return (
        f". For two texts, PromptResponseDataset with its prompt_field and response_field; the texts here "
        f"are {', '.join(texts[:6])}"
    )


def _messages_of(record: Mapping[str, Any], place: str) -> Any:
    if MESSAGES in record:
        return record[MESSAGES]
    if _SHAREGPT in record:
        turns = record[_SHAREGPT] if isinstance(record[_SHAREGPT], list) else []
        return [_turn(one, number, place) for number, one in enumerate(turns)]
    if all(field in record for field in _ALPACA):
        return _of_alpaca(record, place)
    prompt, completion = (record[field] for field in _PARTS)
    return [{**one, "weight": 0} if isinstance(one, dict) else one for one in prompt] + completion


def _of_alpaca(record: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    asked = [record["instruction"], *([record["input"]] if record.get("input") else [])]
    if not all(isinstance(text, str) for text in asked):
        raise DataError(f"{place}: instruction and input must be texts")
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(one, list) and len(one) == 2 for one in history):
        raise DataError(f"{place}: history must be a list of pairs, [question, answer]")
    turns = [*history, ["\n".join(asked), record["output"]]]
    roles = ("user", ASSISTANT)
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]


def _turn(turn: Any, number: int, place: str) -> dict[str, Any]:
    if not isinstance(turn, dict) or not {"from", "role"} & turn.keys():
        raise DataError(f"{place}: message {number} must have from and value: {shown(turn)}")
    name = turn.get("from", turn.get("role"))
    role = _ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise DataError(f"{place}: message {number} is from {shown(name)}; known are {', '.join(_ROLES)}")
    content = turn.get("value", turn.get("content"))
    if name.lower() != _CALL:
        return {**turn, "role": role, "content": content}
    calls = _json_of(content, f"{place}: message {number}, a {_CALL}, is")
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise DataError(f"{place}: message {number}, a {_CALL}, must have name and arguments")
    return {**turn, "role": role, "content": None, "tool_calls": [_wrapped(call) for call in calls]}


def _json_of(value: Any, what: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} not JSON: {error}") from error


def _tools_of(record: Mapping[str, Any], place: str) -> list[Any] | None:
    tools = _json_of(record.get("tools"), f"{place}: tools are") or None  # published records have [] for none
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{place}: tools must be a list: {shown(tools)}")
    if tools is None or MESSAGES in record:
        return tools
    return [_wrapped(tool) for tool in tools]


def _wrapped(tool: Any) -> Any:
    """Return a tool as OpenAI's API has it. In files of LLaMA-Factory, the function stands alone."""
    is_alone = isinstance(tool, dict) and "name" in tool and not {"type", "function"} & tool.keys()
    return {"type": "function", "function": tool} if is_alone else tool


def _checked(message: Any, number: int | str, place: str) -> dict[str, Any]:
    """Return a message with its parts of text joined, and the arguments of its tool calls as objects, as the
    server's chats have them."""
    given = message if isinstance(message, dict) else {}
    role, content = given.get("role"), _joined(given.get("content"))
    says = isinstance(content, str) or (content is None and "tool_calls" in given)
    if not isinstance(role, str) or not says:
        raise DataError(f"{place}: message {number} must have role and content, texts: {shown(message)}")
    refuse_surrogates(content or "", f"{place}: message {number}")
    for key in _LEARNED:
        if role == ASSISTANT and given.get(key) not in (None, 0, 1):
            raise DataError(f"{place}: message {number} has {key} {shown(given[key])}; it may be 0 or 1")
    return with_arguments({**given, "content": content}, f"{place}: message {number}: arguments are")


def _joined(content: Any) -> Any:
    """Return the text of a content that is a list of parts of text. Returns any other content as it is."""
    parts = content if isinstance(content, list) else []
    is_text = all(isinstance(one, dict) and one.get("type") == "text" for one in parts)
    texts = [one.get("text") for one in parts] if is_text else []
    return "\n".join(texts) if texts and all(isinstance(text, str) for text in texts) else content


def with_arguments(message: Message, what: str = "", *, as_text: bool = False) -> dict[str, Any]:
    """Return a message with the arguments of its tool calls as objects, or as JSON texts. OpenAI's files have
    texts, but most chat templates write objects. Raises DataError if a text is not JSON; ``what`` describes
    it in the message."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return {**message}
    return {**message, "tool_calls": [_with_arguments(call, what, as_text) for call in calls]}


def _with_arguments(call: Any, what: str, as_text: bool) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"], what, as_text)}
    if "arguments" not in call:
        return call
    arguments = call["arguments"]
    if as_text:
        is_text = isinstance(arguments, str)
        return {**call, "arguments": arguments if is_text else json.dumps(arguments, ensure_ascii=False)}
    return {**call, "arguments": _json_of(arguments or "{}", what)}
