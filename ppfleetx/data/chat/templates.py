"""Chat templates, which turn a conversation into text in the format that a chat model was trained on. The
text equals the result of Hugging Face's ``apply_chat_template``.

Templates are read from ``chat_template.jinja`` and ``additional_chat_templates/`` in the tokenizer's
directory, or else from ``chat_template`` in ``tokenizer_config.json``. Templates are untrusted code that runs
in servers. Jinja's sandbox denies them access to Python, and limits stop endless loops and huge strings.
These measures do not stop a determined attacker.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial, wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from jinja2 import Template, TemplateError, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ppfleetx.config.errors import ConfigError, DataError, UserError, shown
from ppfleetx.utils.input_files import MAX_JSON_BYTES, read_bounded

if TYPE_CHECKING:
    from ppfleetx.config.sections.data import DatasetConfig
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer


Message = Mapping[str, Any]
"""A message of a conversation, with the keys ``role``, ``content`` (a string or None) and any others that a
template uses."""
Span = tuple[int, int]
"""A range of characters ``[start, end)``, as a pair of offsets."""
MAX_STEPS = 3_000_000
"""Maximum number of steps of a template: executed lines, calls and returns. A conversation of 100 turns takes
a few thousand."""
MAX_SIZE = 1 << 24
"""Maximum size of the value of an expression in a template: characters of a string, elements of a list, bits
of an integer."""
_MAX_NUMBER = 1_000_000  # largest integer that a template may pass to a filter or function
DEFAULT, WITH_TOOLS = "default", "tool_use"
TEMPLATE_OPTION = "chat_template"
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Errors in a template's own expressions, such as a string added to a number.
_OF_EXPRESSIONS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PLAIN_STOPS = ("\nUser:", "\nSystem:")
"""Stop strings for the plain template. The model writes them when it begins the next turn itself."""
PLAIN = """\
{%- for message in messages %}
{{- message.role | capitalize }}:
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ ' ' + message.content | trim + eos_token }}{% endgeneration %}
    {%- else %}
        {{- ' ' + message.content | trim }}
    {%- endif %}
{{- '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""
"""The plain template, for tokenizers without a chat template: ``User: ...``, ``Assistant: ...``, separated by
an empty line."""


class ChatError(UserError):
    """Raised if a chat template refuses a conversation, or fails on it."""


class _RefusedError(TemplateError):
    """Raised if a chat template calls ``raise_exception`` to refuse a conversation."""


@contextmanager
def _bounded_steps() -> Iterator[None]:
    """Context manager that limits how long a template may run: raises TemplateError after `MAX_STEPS` steps
    (executed lines, calls and returns) in this thread."""
    left = MAX_STEPS

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise TemplateError(f"it takes more than {MAX_STEPS:,} steps; does it loop forever?")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class _GenerationBlocks(Extension):
    """Jinja extension for ``{% generation %} ... {% endgeneration %}``, in which templates enclose the
    assistant's text. Records where this text is in the output. Several threads can render at the same
    time."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._local = threading.local()
        environment.tracker = self

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    @pass_eval_context
    def mark(self, context: nodes.EvalContext, caller: Callable[[], str]) -> str:
        text = caller()
        start = sum(map(len, self._local.pieces))
        self._local.spans.append((start, start + len(text)))
        return text

    def render(self, template: Template, variables: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """Render a template of this environment. Returns the text, and the spans of the text that are inside
        ``generation`` blocks."""
        self._local.pieces, self._local.spans = [], []
        for piece in template.generate(variables):
            self._local.pieces.append(piece)
        return "".join(self._local.pieces), self._local.spans


def _check_size(operator: str, left: Any, right: Any) -> None:
    """Raise TemplateError if the result of ``left operator right`` would be larger than `MAX_SIZE`."""
    sizes = [
        abs(one).bit_length() if isinstance(one, int) else len(one) if hasattr(one, "__len__") else 0
        for one in (left, right)
    ]
    is_repetition = operator == "*" and isinstance(left, int) != isinstance(right, int)
    if operator == "**" and isinstance(right, int):
        size = sizes[0] * abs(right)
    elif is_repetition:
        size = sizes[0] * right if isinstance(right, int) else sizes[1] * left
    else:
        size = sum(sizes)
    if size > MAX_SIZE:
        raise TemplateError(f"it makes a text, list or number of size {size:,}; the most is {MAX_SIZE:,}")


def _check_arguments(name: str, arguments: Iterable[Any]) -> None:
    """Raise TemplateError if ``arguments``, passed to the filter or function ``name``, include an integer
    larger than `_MAX_NUMBER` in magnitude."""
    for one in arguments:
        if isinstance(one, int) and abs(one) > _MAX_NUMBER:
            raise TemplateError(f"it calls {name} with {one}")


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(name, (*args, *kwargs.values()))
        return function(*args, **kwargs)

    return call


class _BoundedCode(CodeGenerator):
    """Jinja code generator that compiles ``a ~ b`` to a call of `_Environment.join`, which limits the size of
    the result."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (Jinja's interface)
        self.write("environment.join((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _BoundedCode
    intercepted_binops = frozenset({"+", "*", "**"})
    tracker: _GenerationBlocks

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the optimizer would evaluate constant expressions without limits
            extensions=[_GenerationBlocks, LoopControlExtension],
        )
        self.filters = {name: _bounded(name, one) for name, one in self.filters.items()}
        self.filters["tojson"] = _to_json
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_size(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def join(self, parts: Iterable[Any]) -> str:
        text = ""
        for part in map(str, parts):
            _check_size("+", text, part)
            text += part
        return text

    # A template's own arguments must not collide with these names, hence Jinja's spelling.
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if not isinstance(getattr(__obj, "__self__", None), Extension):
            _check_arguments(getattr(__obj, "__name__", "a function"), (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> None:
    raise _RefusedError(str(message))


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the special tokens that it uses.

    Attributes:
        source: the template in Jinja.
        special_tokens: special tokens as strings, by names such as ``bos_token``.
        place: where the template comes from, for messages.
        stops: stop strings, which end an answer in addition to the end tokens.
        is_plain: whether ``source`` is `PLAIN`, used for tokenizers without a chat template.
        with_tools: the template for conversations with tools; None: this one.
    """

    source: str
    special_tokens: Mapping[str, str]
    place: str = "the chat template"
    stops: tuple[str, ...] = ()
    is_plain: bool = False
    with_tools: ChatTemplate | None = None

    def for_tools(self, tools: object) -> ChatTemplate:
        """Return the template for a conversation with ``tools``; None: it has none."""
        return self if tools is None or self.with_tools is None else self.with_tools

    @cached_property
    def marks_answers(self) -> bool:
        """Whether the template itself marks the assistant's turns with ``generation`` blocks."""
        return _GENERATION.search(self.source) is not None

    def check(self) -> None:
        """Raise DataError if the source is not a valid Jinja template."""
        _ = self._render

    @cached_property
    def _render(self) -> Callable[[Mapping[str, Any]], tuple[str, list[Span]]]:
        environment = _Environment()
        try:
            return partial(environment.tracker.render, environment.from_string(self.source))
        except (TemplateError, RecursionError) as error:
            line = f"line {error.lineno}: " if hasattr(error, "lineno") else ""
            raise DataError(f"{self.place} is not a valid chat template: {line}{error}") from error

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render a conversation as text. With ``add_generation_prompt``, the text ends with the beginning of
        an assistant's turn; with ``continue_final_message``, it ends with the content of the last message.
        ``variables`` are passed to the template and override the special tokens. Raises ChatError if the
        template refuses the conversation or fails, and DataError if it is not valid Jinja."""
        given = {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
        if continue_final_message and add_generation_prompt:
            raise ChatError("continue_final_message needs add_generation_prompt=False")
        if continue_final_message and messages:
            return self._render_open(messages, **given, **variables)
        return self.render_spans(messages, **given, **variables)[0]

    def _render_open(self, messages: Sequence[Message], **variables: Any) -> str:
        """Render a conversation up to the end of the last message's content. Raises ChatError if the template
        does not write this content."""
        *earlier, last = messages
        last = _message(last)
        content = last.get("content", "")
        if not isinstance(content, str):
            raise ChatError("the last message has no text to continue")
        # A template that trims contents removes the space after the placeholder.
        marked = {**last, "content": f"{content}{_HERE} "}
        text, found, behind = self.render_spans([*earlier, marked], **variables)[0].rpartition(_HERE)
        if not found or content.strip() not in text:
            raise ChatError(f"{self.place} does not write the text of the last message")
        return text if behind.startswith(" ") else text.rstrip()

    def render_spans(self, messages: Sequence[Message], /, **variables: Any) -> tuple[str, list[Span]]:
        """Render a conversation as text, with the arguments of :meth:`render`. Returns the text, and the
        spans of the text that ``generation`` blocks mark. Raises ChatError if the template refuses the
        conversation or fails, and DataError if it is not valid Jinja."""
        if not messages:
            raise ChatError("a conversation has at least one message")
        if (chosen := self.for_tools(variables.get("tools"))) is not self:
            return chosen.render_spans(messages, **variables)
        render = self._render
        values = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
            **self.special_tokens,
            **variables,
            "messages": [_message(one) for one in messages],
        }
        try:
            with _bounded_steps():
                return render(values)
        except _RefusedError as error:
            raise ChatError(f"{self.place} refuses the conversation: {error}") from error
        except SecurityError as error:
            raise ChatError(f"{self.place} uses what templates may not access: {error}") from error
        except (TemplateError, *_OF_EXPRESSIONS) as error:
            raise ChatError(f"{self.place} fails on this conversation: {error}") from error

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Message], **options: Any) -> list[int]:
        """Render a conversation and encode the text. The tokenizer adds no BOS, because the template writes
        it."""
        return tokenizer.encode_prompt(self.render(messages, **options), add_special_tokens=False)


def _message(message: Message) -> dict[str, Any]:
    """Return a copy of ``message`` to pass to a template. Values that are None are left out. The assistant's
    reasoning is given under the names ``thinking`` and ``reasoning_content``. Raises ChatError if ``message``
    is not an object with a role."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatError(f"a message is an object with role and content, not {shown(message)}")
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in _REASONING if key in kept), None)
    if reasoning is not None:
        kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
    return kept


def find_template(tokenizer: Tokenizer, name: str | None = None) -> ChatTemplate:
    """Return the tokenizer's chat template ``name``. If ``name`` is None, returns the default template, which
    is replaced by the template ``tool_use`` for conversations with tools, as in transformers; or the plain
    template if the tokenizer has no templates. Raises ConfigError if there is no such template, and
    DataError if a file is damaged."""
    sources, tokens = tokenizer.chat_templates, tokenizer.special_token_texts
    if not sources and name is None:
        eos = {"eos_token": tokens.get("eos_token", tokenizer.eod_token if tokenizer.has_eod else "")}
        return ChatTemplate(PLAIN, {**tokens, **eos}, "the plain chat template", PLAIN_STOPS, True)
    chosen = DEFAULT if name is None else name
    if chosen not in sources:
        listed = ", ".join(sorted(sources)) or "none"
        raise ConfigError(f"{tokenizer.place} has no chat template {chosen!r}; it has: {listed}")
    place = "the chat template" if chosen == DEFAULT else f"the chat template {chosen!r}"
    with_tools = find_template(tokenizer, WITH_TOOLS) if name is None and WITH_TOOLS in sources else None
    return ChatTemplate(sources[chosen], tokens, f"{place} of {tokenizer.place}", with_tools=with_tools)


def chosen_template(tokenizer: Tokenizer, given: str | None, key: str | None = None) -> ChatTemplate:
    """Return the chat template that a user's option selects. ``given`` is the value of the option: the name
    of one of the tokenizer's templates, or the path of a template file. If it is None, the result is the
    default template, or the plain one if the tokenizer has no templates. ``key`` is the name of the option,
    for messages. Raises UserError if the template does not exist or cannot be used."""
    if given is None or given in tokenizer.chat_templates:
        template = find_template(tokenizer, given)
    elif not Path(given).exists():
        listed = ", ".join(sorted(tokenizer.chat_templates)) or "none"
        raise ConfigError(
            f"there is no file {given}, and no chat template of this name (there are: {listed})",
            key=key,
            value=given,
        )
    else:
        content = read_bounded(given, MAX_JSON_BYTES, DataError)
        template = ChatTemplate(content.decode("utf-8", "replace"), tokenizer.special_token_texts, given)
    template.check()
    return template


def template_of(cfg: DatasetConfig, tokenizer: Tokenizer) -> ChatTemplate:
    given = cfg.options.get(TEMPLATE_OPTION)
    try:
        return chosen_template(tokenizer, None if given is None else str(given))
    except UserError as error:
        raise ConfigError(str(error), key=f"Data.*.dataset.options.{TEMPLATE_OPTION}", value=given) from error


ASSISTANT = "assistant"
# Placeholder contents of two messages, to find where a template writes the messages.
_BEFORE, _HERE = "\ue000\uf8f0\ue001", "\ue002\uf8f1\ue003"


def render_with_answers(
    template: ChatTemplate, messages: Sequence[Message], **variables: Any
) -> tuple[str, list[Span]]:
    """Render a conversation as text. Returns the text, and the spans of the assistant's turns in it. Raises
    ChatError if the template refuses the conversation or fails, or if a turn cannot be located in the text.
    Raises DataError if the template is not valid Jinja."""
    template = template.for_tools(variables.get("tools"))
    if template.marks_answers:
        return template.render_spans(messages, **variables)
    # Without generation blocks, the span of a turn is the text that it adds to the messages before it. If
    # later messages change how this text is rendered (Qwen3), a placeholder in the turn shows where it is.
    turns = _Turns(template, messages, variables)
    spans = [turns.span(index) for index, one in enumerate(messages) if one["role"] == ASSISTANT]
    return turns.text, spans


class _Turns:
    def __init__(
        self, template: ChatTemplate, messages: Sequence[Message], variables: dict[str, Any]
    ) -> None:
        self._template, self._messages, self._variables = template, list(messages), variables
        self.text = self._render(self._messages)

    def _render(self, messages: Sequence[Message], **more: Any) -> str:
        return self._template.render(messages, **{**self._variables, **more})

    def span(self, index: int) -> Span:
        found = self._span_by_difference(index)
        if found is None:
            try:
                found = self._span_by_placeholder(index)
            except (ChatError, ValueError) as error:
                raise ChatError(
                    f"{self._template.place} does not show where it writes message {index}: put "
                    "{% generation %} and {% endgeneration %} around what the assistant says"
                ) from error
        return found

    def _span_by_difference(self, index: int) -> Span | None:
        """Return the span of the message with index ``index``, found with two renderings. The first
        has the earlier messages and a generation prompt, and the span begins where it ends. The second has
        the earlier messages and this one, and the span ends where it ends. Returns None if the text of the
        whole conversation does not begin with both renderings, or if ``index`` is 0."""
        if index == 0:  # the first message cannot follow a generation prompt
            return None
        with_it = self._render(self._messages[: index + 1])
        if not self.text.startswith(with_it):
            return None
        before = self._render(self._messages[:index], add_generation_prompt=True)
        return (len(before), len(with_it)) if with_it.startswith(before) else None

    def _span_by_placeholder(self, index: int) -> Span:
        """Return the span of the message with index ``index``, found by rendering the conversation with a
        placeholder as the message's content. Raises ValueError if the span cannot be found in this way."""
        whole = self._with(index, _HERE)
        before, behind = _around(_HERE, self._render(whole))
        end = _around(_HERE, self._render(whole[: index + 1]))[1]
        if not behind.startswith(end):
            end = self._without_end_of_text(end) or end
        if index == 0:
            first, start = 0, self._end_of_prompt(before)
        else:
            earlier = self._with(index - 1, _BEFORE)
            both = self._render([*earlier[:index], *whole[index:]])
            between = _around(_HERE, _around(_BEFORE, both)[1])[0]
            prompt = _around(_BEFORE, self._render(earlier[:index], add_generation_prompt=True))[1]
            first = len(before.removesuffix(between))
            start = first + _common(between, prompt)
        rest = behind.removeprefix(end)
        start, stop = min(start, _common(before, self.text)), len(self.text) - len(rest)
        if not (behind.startswith(end) and self.text.endswith(rest) and first <= start <= stop):
            raise ValueError("with another content the turn is written in another way")
        return start, stop

    def _without_end_of_text(self, text: str) -> str:
        """Return ``text`` without the end-of-text token at its end. Some templates write this token only
        after the last message of a conversation, so it is missing where more messages follow."""
        return text.removesuffix(self._template.special_tokens.get("eos_token", ""))

    def _with(self, index: int, content: str) -> list[Message]:
        return [
            {**one, "content": content} if place == index else one for place, one in enumerate(self._messages)
        ]

    def _end_of_prompt(self, text: str) -> int:
        """Return the offset in ``text`` after the generation prompt, which the template writes before an
        answer. If ``text`` has only the first characters of this prompt, returns the offset after those. If
        it has none of them, returns 0."""
        question = [{"role": "user", "content": _BEFORE}]
        asked = self._without_end_of_text(self._render(question))
        prompt = self._render(question, add_generation_prompt=True).removeprefix(asked)
        # `text` may have only the beginning of the generation prompt.
        written = next((prompt[:size] for size in range(len(prompt), 0, -1) if prompt[:size] in text), "")
        return text.find(written) + len(written)


def _around(mark: str, text: str) -> tuple[str, str]:
    before, found, behind = text.partition(mark)
    if not found or mark in behind:
        raise ValueError(f"the mark is written {text.count(mark)} times")
    return before, behind


def _common(one: str, other: str) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
