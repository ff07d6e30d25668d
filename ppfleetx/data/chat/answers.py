"""Which part of a rendered conversation is the assistant's: what a model is to learn of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppfleetx.data.chat.sandbox import Span
from ppfleetx.data.chat.templates import ChatError, ChatTemplate, Message

ASSISTANT = "assistant"
# Contents of two messages that show where a template writes them.
_BEFORE, _HERE = "\ue000\uf8f0\ue001", "\ue002\uf8f1\ue003"


def render_with_answers(
    template: ChatTemplate, messages: Sequence[Message], **variables: Any
) -> tuple[str, list[Span]]:
    """The conversation as text, and where the assistant's turns are in it.

    A template with ``{% generation %}`` blocks says so itself. Of another one, a turn is what rendering with
    it adds to rendering without it and with a generation prompt. Where a template writes earlier turns in
    another way once more follow (Qwen3 and DeepSeek-R1 leave out their reasoning), that holds for the turn
    as it is written in the whole conversation.

    Raises:
        ChatError: as in :meth:`ChatTemplate.render`; or there is no telling where the template writes a turn.
    """
    if template.marks_answers:
        return template.render_spans(messages, **variables)
    turns = _Turns(template, messages, variables)
    spans = [turns.span(number) for number, one in enumerate(messages) if one["role"] == ASSISTANT]
    return turns.text, spans


class _Turns:
    """A conversation, and where its turns are in its text."""

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Message], variables: dict[str, Any]
    ) -> None:
        self._template, self._messages, self._variables = template, list(messages), variables
        self.text = self._render(self._messages)

    def _render(self, messages: Sequence[Message], **more: Any) -> str:
        return self._template.render(messages, **{**self._variables, **more})

    def span(self, number: int) -> Span:
        """Where message ``number`` is. Raises ChatError."""
        found = self._added(number)
        if found is None:
            try:
                found = self._marked(number)
            except (ChatError, ValueError) as error:
                raise ChatError(
                    f"{self._template.place} does not tell where it writes message {number}: put "
                    "{% generation %} and {% endgeneration %} around what the assistant says"
                ) from error
        return found

    def _added(self, number: int) -> Span | None:
        """What the message adds to those before it; None where the whole conversation has something else."""
        if number == 0:  # there is nothing before it to ask for an answer
            return None
        with_it = self._render(self._messages[: number + 1])
        if not self.text.startswith(with_it):
            return None
        before = self._render(self._messages[:number], add_generation_prompt=True)
        return (len(before), len(with_it)) if with_it.startswith(before) else None

    def _marked(self, number: int) -> Span:
        """The turn around the place where the whole conversation has the message's content. Raises
        ValueError: there is not one such place."""
        whole = self._with(number, _HERE)
        before, behind = _around(_HERE, self._render(whole))
        end = _around(_HERE, self._render(whole[: number + 1]))[1]
        if not behind.startswith(end):
            end = self._without_end_of_text(end) or end
        if number == 0:
            first, start = 0, self._behind_prompt(before)
        else:
            earlier = self._with(number - 1, _BEFORE)
            both = self._render([*earlier[:number], *whole[number:]])
            between = _around(_HERE, _around(_BEFORE, both)[1])[0]
            prompt = _around(_BEFORE, self._render(earlier[:number], add_generation_prompt=True))[1]
            first = len(before.removesuffix(between))
            start = first + _common(between, prompt)
        rest = behind.removeprefix(end)
        start, stop = min(start, _common(before, self.text)), len(self.text) - len(rest)
        if not (behind.startswith(end) and self.text.endswith(rest) and first <= start <= stop):
            raise ValueError("with another content the turn is written in another way")
        return start, stop

    def _without_end_of_text(self, text: str) -> str:
        """Without the token that ends a text, where a template writes it behind the last turn alone."""
        return text.removesuffix(self._template.special_tokens.get("eos_token", ""))

    def _with(self, number: int, content: str) -> list[Message]:
        """The conversation with other content of one message."""
        return [
            {**one, "content": content} if place == number else one
            for place, one in enumerate(self._messages)
        ]

    def _behind_prompt(self, text: str) -> int:
        """Where an answer begins that no message precedes, in the text before its content."""
        question = [{"role": "user", "content": _BEFORE}]
        asked = self._without_end_of_text(self._render(question))
        prompt = self._render(question, add_generation_prompt=True).removeprefix(asked)
        written = next((prompt[:size] for size in range(len(prompt), 0, -1) if prompt[:size] in text), "")
        return text.find(written) + len(written)


def _around(mark: str, text: str) -> tuple[str, str]:
    before, found, behind = text.partition(mark)
    if not found or mark in behind:
        raise ValueError(f"the mark is written {text.count(mark)} times")
    return before, behind


def _common(one: str, other: str) -> int:
    """Characters with which both begin."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
