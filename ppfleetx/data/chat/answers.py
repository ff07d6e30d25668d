"""Which part of a rendered conversation is the assistant's: what a model is to learn of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppfleetx.data.chat.templates import ChatError, ChatTemplate, Message

ASSISTANT = "assistant"


def render_with_answers(
    template: ChatTemplate, messages: Sequence[Message], **variables: Any
) -> tuple[str, list[tuple[int, int]]]:
    """The conversation as text, and where the assistant's turns are in it.

    A template with ``{% generation %}`` blocks says so itself. Of another one, a turn is what rendering with
    it adds to rendering without it, generation prompt included.

    Raises:
        ChatError: as of :meth:`ChatTemplate.render`; the template writes a turn in another way when more
            turns follow, so that this cannot be told.
    """
    if template.marks_answers:
        return template.render_spans(messages, **variables)
    text = template.render(messages, **variables)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        earlier = messages[:number]
        before = template.render(earlier, add_generation_prompt=True, **variables) if earlier else ""
        with_it = template.render(messages[: number + 1], **variables)
        if not (with_it.startswith(before) and text.startswith(with_it)):
            raise ChatError(
                f"{template.place} does not write message {number} as it would at the end of the "
                "conversation: put {% generation %} and {% endgeneration %} around what the assistant says"
            )
        spans.append((len(before), len(with_it)))
    return text, spans
