"""The Jinja environment for chat templates, with the extensions of Hugging Face transformers.

As documented by transformers, templates can use ``trim_blocks`` and ``lstrip_blocks``, ``break`` and
``continue``, ``generation`` blocks, ``tojson`` without HTML escapes, ``raise_exception`` and
``strftime_now``. A template comes with a model, from an unknown author: Jinja's sandbox keeps it away from
Python, and a limit of steps stops endless loops. Neither stops a determined attacker.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_eval_context
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 3_000_000
"""The most lines of compiled template code to run. A conversation of a hundred turns takes a few thousand."""


class TemplateLimitError(Exception):
    """A template runs too long, or makes a text that is too large."""


@contextmanager
def bounded_steps() -> Iterator[None]:
    """Raise TemplateLimitError when Python functions called inside take more than ``MAX_STEPS`` steps in this
    thread.
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


Span = tuple[int, int]
"""The positions of the first character and of the one after the last."""


class AskedToStopError(TemplateError):
    """The template called ``raise_exception`` to refuse the conversation."""


class CompiledTemplate:
    """A compiled template, which any thread can render. Raises jinja2.TemplateError or TemplateLimitError."""

    def __init__(self, source: str) -> None:
        self._environment = _Environment()
        try:
            self._template: Template = self._environment.from_string(source)
        except RecursionError:
            raise TemplateLimitError("it is nested too deeply") from None

    def render(self, variables: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """Render the text, and find the parts of it that come from ``generation`` blocks. Raises
        jinja2.TemplateError, :class:`AskedToStopError` if it refuses the conversation, TemplateLimitError, or
        any error of its own expressions."""
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
    """Jinja extension: ``{% generation %} ... {% endgeneration %}`` marks text written by the model."""

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


class _Environment(ImmutableSandboxedEnvironment):
    tracker: _GenerationBlocks

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlocks, LoopControlExtension],
        )
        self.filters["tojson"] = _to_json
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }


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
