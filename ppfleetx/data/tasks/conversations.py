"""Records of conversations, in the forms in which they are published, as messages.

- ``{"messages": [{"role": ..., "content": ...}, ...]}``, perhaps with ``tools``,
- ShareGPT's ``{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}``,
- Alpaca's ``{"instruction": ..., "input": ..., "output": ...}``.

The last two may have ``system``, the system message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ppfleetx.config.errors import DataError, shown
from ppfleetx.data.chat.answers import ASSISTANT
from ppfleetx.data.text_files import load_line

MESSAGES = "messages"
_SHAREGPT, _ALPACA = "conversations", ("instruction", "output")
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bing", "bard"), ASSISTANT),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}


def is_conversation(record: Mapping[str, Any]) -> bool:
    """Whether a record has the fields of one of the forms."""
    return MESSAGES in record or _SHAREGPT in record or all(field in record for field in _ALPACA)


def read_conversation(line: bytes, place: str) -> dict[str, Any]:
    """The record of a line: ``messages``, with at least one answer, and its other keys.

    Raises:
        DataError: it is none; with its place.
    """
    try:
        record = load_line(line)
    except ValueError as error:
        raise DataError(f"{place}: this is not a line of JSON: {error}") from error
    if not isinstance(record, dict) or not is_conversation(record):
        raise DataError(
            f'{place}: must be an object with "{MESSAGES}", with "{_SHAREGPT}" (ShareGPT), or with '
            '"instruction" and "output" (Alpaca)'
        )
    if MESSAGES not in record:
        record = _in_messages(record, place)
    _check(record[MESSAGES], place)
    return record


def _in_messages(record: dict[str, Any], place: str) -> dict[str, Any]:
    if _SHAREGPT in record:
        turns = record[_SHAREGPT] if isinstance(record[_SHAREGPT], list) else []
        messages = [_turn(one, number, place) for number, one in enumerate(turns)]
    else:
        asked = [record["instruction"], *([record["input"]] if record.get("input") else [])]
        if not all(isinstance(text, str) for text in asked):
            raise DataError(f"{place}: instruction and input must be texts")
        messages = [
            {"role": "user", "content": "\n".join(asked)},
            {"role": ASSISTANT, "content": record["output"]},
        ]
    if system := record.get("system"):
        messages = [{"role": "system", "content": system}, *messages]
    tools = record.get("tools") or None
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: tools are not JSON: {error}") from error
    return {MESSAGES: messages, "tools": tools}


def _turn(turn: Any, number: int, place: str) -> dict[str, Any]:
    if not isinstance(turn, dict) or not {"from", "role"} & turn.keys():
        raise DataError(f"{place}: message {number} must have from and value: {shown(turn)}")
    name = turn.get("from", turn.get("role"))
    role = _ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise DataError(f"{place}: message {number} is from {shown(name)}; known are {', '.join(_ROLES)}")
    return {**turn, "role": role, "content": turn.get("value", turn.get("content"))}


def _check(messages: Any, place: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{place}: has no list of messages")
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        says = isinstance(content, str) or (content is None and "tool_calls" in message)
        if not isinstance(role, str) or not says:
            raise DataError(f"{place}: message {number} must have role and content, texts: {shown(message)}")
        if isinstance(content, str) and any("\ud800" <= character <= "\udfff" for character in content):
            raise DataError(f"{place}: message {number} holds a lone surrogate, which is not text")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise DataError(f"{place}: has no message of the role assistant, so there is nothing to learn")
