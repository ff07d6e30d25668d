"""The Jinja that chat templates expect: the environment of Hugging Face transformers, with limits.

Blocks and their spaces (``trim_blocks``, ``lstrip_blocks``), ``break`` and ``continue``, ``generation``
blocks, ``tojson`` without HTML's escapes, ``raise_exception`` and ``strftime_now`` are what transformers
documents. The sandbox is Jinja's: no attribute with an underscore, no changes to its arguments.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ppfleetx.data.chat.bounds import (
    TemplateLimitError,
    bounded_steps,
    check_call,
    check_depth,
    check_format,
    check_operation,
)

Span = tuple[int, int]
"""First character, and the one behind the last."""


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
