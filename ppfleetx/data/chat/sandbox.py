"""The Jinja that chat templates expect: the environment of Hugging Face transformers, with limits.

Blocks and their spaces (``trim_blocks``, ``lstrip_blocks``), ``break`` and ``continue``, ``generation``
blocks, ``tojson`` without HTML's escapes, ``raise_exception`` and ``strftime_now`` are what transformers
documents. A template comes with a model, from an unknown author. Jinja's sandbox keeps it away from Python;
the limits keep it from running forever or building a text of a billion characters.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""Lines of compiled template code; a conversation of a hundred turns takes some thousands."""
MAX_SIZE = 1 << 24
"""Characters of a text, or elements of a list."""
_MAX_NUMBER = 1_000_000  # as an argument of a filter or a function
_MAX_BITS = 1 << 16
_LARGE_NUMBER = re.compile(r"\d{6}|\*")


class TemplateLimitError(Exception):
    """A template runs too long or makes something too large."""


@contextmanager
def bounded_steps(most: int = MAX_STEPS) -> Iterator[None]:
    """Let Python functions that are called within take ``most`` steps together, in this thread.

    Raises:
        TemplateLimitError: from within, when they take more.
    """
    left = most

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise TemplateLimitError(f"it takes more than {most:,} steps; does it loop forever?")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Raise TemplateLimitError for a result that would be too large."""
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
    elif operator == "%" and isinstance(left, str):
        check_format(left)


def check_format(text: str) -> None:
    """Raise TemplateLimitError for a format that asks for a large width."""
    if _LARGE_NUMBER.search(text):
        raise TemplateLimitError(
            f"it formats with a width that is too large, or not written out: {text[:40]!r}"
        )


def check_call(name: str, value: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise TemplateLimitError if a filter, or a method of ``value``, would make something too large.

    Args:
        name: name of the filter or method.
        value: what it is applied to.
        arguments, named: what it is given beside.
    """
    given = [*arguments, *named.values()]
    for one in (value, *given):
        if isinstance(one, list | tuple | dict):
            check_depth(one)
    for one in given:
        if isinstance(one, int) and abs(one) > _MAX_NUMBER:
            raise TemplateLimitError(f"it calls {name} with {one}")
    texts = [one for one in given if isinstance(one, str)]
    if name == "replace" and isinstance(value, str) and len(texts) > 1:
        count = value.count(texts[0]) if texts[0] else len(value) + 1
        _check_size(len(value) + count * len(texts[1]))
    elif name == "join":
        items = next((one for one in (value, *given) if isinstance(one, list | tuple | dict)), ())
        separator = next((one for one in (value, *given) if isinstance(one, str)), "")
        _check_size(len(items) * len(separator) + sum(len(one) for one in items if isinstance(one, str)))
    elif name in ("indent", "expandtabs", "translate") and isinstance(value, str):
        widest = max(
            (one if isinstance(one, int) else len(one) for one in given if _has_bound(one)), default=8
        )
        _check_size(len(value) * max(1, widest))
    elif name in ("format", "format_map") and isinstance(value, str):
        check_format(value)
    elif name in ("tojson", "round", "batch", "slice", "pprint"):
        small = 1000
        if any(isinstance(one, int) and abs(one) > small for one in given):
            raise TemplateLimitError(f"it calls {name} with a number above {small}")


def check_depth(value: Any) -> None:
    """Raise TemplateLimitError for lists within lists that hold too much altogether.

    Python writes a list that holds another twice with all its elements twice: forty lists of two are a text
    of 10^12 characters.
    """
    left = MAX_SIZE // 64
    level = [value]
    while level:
        below = []
        for node in level:
            children = [*node.keys(), *node.values()] if isinstance(node, dict) else node
            left -= len(children)
            if left < 0:
                raise TemplateLimitError("its lists hold too much")
            below += [one for one in children if isinstance(one, list | tuple | dict)]
        level = below


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateLimitError(f"it makes a text or a list of {size:,}; the most is {MAX_SIZE:,}")


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateLimitError(f"it makes a number of {bits:,} bits; the most is {_MAX_BITS:,}")


def _has_size(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple)


def _has_bound(value: Any) -> bool:
    return isinstance(value, int | str | dict)


Span = tuple[int, int]
"""First character, and the one after the last."""


class AskedToStopError(TemplateError):
    """The template has called ``raise_exception``: it refuses the conversation."""


class CompiledTemplate:
    """A compiled template, which any thread can render.

    Args:
        source: text of the template.

    Raises:
        jinja2.TemplateError: the text is not a template.
        TemplateLimitError: it is nested too deeply.
    """

    def __init__(self, source: str) -> None:
        self._environment = _Environment()
        try:
            self._template: Template = self._environment.from_string(source)
        except RecursionError:
            raise TemplateLimitError("it is nested too deeply") from None

    def render(self, variables: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """The text, and the parts of it that come from ``generation`` blocks.

        Raises:
            jinja2.TemplateError: of the template, or its own (:class:`AskedToStopError`).
            TemplateLimitError: it runs too long or makes something too large.
            TypeError, ValueError, ...: an expression of the template fails.
        """
        with self._environment.tracker.following() as (pieces, spans), bounded_steps():
            try:
                for piece in self._template.generate(variables):
                    pieces.append(piece)
            except RecursionError:
                raise TemplateLimitError("it calls itself too often") from None
        return "".join(pieces), spans


class _GenerationBlocks(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks the text of the model."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja has it)

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
    """Concatenation with ``~`` goes through the environment, like ``+``."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (as Jinja has it)
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on sizes."""

    code_generator_class = _BoundedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    tracker: _GenerationBlocks

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # it would compute constants without limits
            extensions=[_GenerationBlocks, LoopControlExtension],
            finalize=_bounded_output,
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded_filter(name, one) for name, one in self.filters.items()}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        if isinstance(text := getattr(value, "__self__", None), str) and value.__name__ in (
            "format",
            "format_map",
        ):
            check_format(text)
        return super().wrap_str_format(value)

    def concatenate(self, parts: tuple[Any, ...]) -> str:
        text = ""
        for part in parts:
            piece = str(_bounded_output(part))
            check_operation("+", text, piece)
            text += piece
        return text

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (names of a
        # template's own arguments must not meet these, which is why Jinja writes them so)
        owner = getattr(__obj, "__self__", None)
        if not isinstance(owner, Extension):
            check_call(getattr(__obj, "__name__", "a function"), owner, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def _bounded_output(value: Any) -> Any:
    if isinstance(value, list | tuple | dict):
        check_depth(value)
    return value


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    takes_more = hasattr(function, "jinja_pass_arg")  # the environment or the context comes first

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        given = args[1:] if takes_more else args
        check_call(name, given[0] if given else None, given[1:], kwargs)
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
    raise AskedToStopError(str(message))


def _strftime_now(form: str) -> str:
    check_format(form)
    return datetime.now().strftime(form)
