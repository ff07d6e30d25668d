"""Run chat templates in Jinja, with the extensions that Hugging Face transformers offers them, such as
``generation`` blocks and ``raise_exception``.

Jinja's sandbox denies templates access to Python. Endless loops and huge texts raise TemplateLimitError.
These limits do not stop a determined attacker.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 3_000_000
"""Maximum number of steps of a template: executed lines, calls and returns. A conversation of 100 turns takes
a few thousand."""
MAX_SIZE = 1 << 24
"""Maximum size of a text (in characters) or a list (in elements) that a template can build."""
_MAX_NUMBER = 1_000_000  # largest number that may be passed to a filter or function
_MAX_BITS = 1 << 16


class TemplateLimitError(Exception):
    """A chat template exceeds a limit: it runs too long or builds something too large."""


@contextmanager
def bounded_steps() -> Iterator[None]:
    """Context manager that limits how long a template may run: raises TemplateLimitError after `MAX_STEPS`
    steps (executed lines, calls and returns) in this thread.
    """
    left = MAX_STEPS

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS:,} steps; does it loop forever?")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Raise TemplateLimitError if the result of ``left operator right`` in a template would be too large."""
    if operator == "+" and _has_size(left) and _has_size(right):
        _check_size(len(left) + len(right))
    elif operator == "*":
        if _has_size(left) or _has_size(right):
            sized, count = (left, right) if _has_size(left) else (right, left)
            _check_size(len(sized) * (count if isinstance(count, int) else 1))
        elif isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def check_call(name: str, arguments: Iterable[Any]) -> None:
    """Raise TemplateLimitError if a template passes a very large integer to the filter or function
    ``name``."""
    for one in arguments:
        if isinstance(one, int) and abs(one) > _MAX_NUMBER:
            raise TemplateLimitError(f"it calls {name} with {one}")


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateLimitError(f"it makes a text or a list of {size:,}; the most is {MAX_SIZE:,}")


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateLimitError(f"it makes a number of {bits:,} bits; the most is {_MAX_BITS:,}")


def _has_size(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple)


Span = tuple[int, int]
"""A range of characters ``[start, end)``, as a pair of offsets."""


class TemplateRefusedError(TemplateError):
    """The template refuses the conversation: it called ``raise_exception``."""


class CompiledTemplate:
    """A compiled chat template. Several threads can render it at the same time. Raises jinja2.TemplateError
    or TemplateLimitError if the source cannot be compiled."""

    def __init__(self, source: str) -> None:
        self._environment = _Environment()
        try:
            self._template: Template = self._environment.from_string(source)
        except RecursionError:
            raise TemplateLimitError("it is nested too deeply") from None

    def render(self, variables: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """Render the template. Returns the text, and the spans of the text that are inside ``generation``
        blocks. Raises TemplateRefusedError, TemplateLimitError, jinja2.TemplateError, or any error of an
        expression in the template."""
        with self._environment.tracker.following() as (pieces, spans), bounded_steps():
            try:
                for piece in self._template.generate(variables):
                    pieces.append(piece)
            except RecursionError:
                raise TemplateLimitError("it calls itself too often") from None
            except MemoryError:
                raise TemplateLimitError("it makes a text that does not fit into memory") from None
        return "".join(pieces), spans


class _GenerationBlocks(Extension):
    """Jinja extension for ``{% generation %} ... {% endgeneration %}``, in which templates enclose the
    assistant's text. Records where this text is in the output."""

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

    @contextmanager
    def following(self) -> Iterator[tuple[list[str], list[Span]]]:
        self._local.pieces, self._local.spans = [], []
        yield self._local.pieces, self._local.spans


class _BoundedCode(CodeGenerator):
    """Jinja code generator that replaces the operator ``~`` (concatenation) with a call to
    ``_Environment.concatenate``, which limits the length of the result."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (Jinja's interface)
        self.write("environment.concatenate((")
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
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded_filter(name, one) for name, one in self.filters.items()}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def concatenate(self, parts: tuple[Any, ...]) -> str:
        text = ""
        for part in parts:
            piece = str(part)
            check_operation("+", text, piece)
            text += piece
        return text

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (names of a
        # template's own arguments must not collide with these, hence Jinja's spelling)
        owner = getattr(__obj, "__self__", None)
        if not isinstance(owner, Extension):
            check_call(getattr(__obj, "__name__", "a function"), (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        check_call(name, (*args, *kwargs.values()))
        return function(*args, **kwargs)

    return bounded


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
    raise TemplateRefusedError(str(message))
