"""float16 and bfloat16 on a CPU, whose Paddle has no kernels for them: for tests only.

Within :func:`emulated` every operator of Paddle takes 16-bit tensors: they are converted to float32, the
float32 kernel runs, and its result is rounded back. The conversions are operators themselves, so gradients
are rounded at the same places. What works in place computes in float32 and rounds into the same tensor.
``adamw_`` with master weights updates the float32 master and rounds it into the parameter.
``paddle.amp.auto_cast`` casts by Paddle's own lists, in which operators have the names they have on a GPU.
The program takes the paths of a GPU where it asks for the device.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import paddle
from paddle import _C_ops

LOW = (paddle.float16, paddle.bfloat16)
FLOATS = (*LOW, paddle.float32)
# Operators whose CPU kernels take both 16-bit types, forward and backward (those in place: forward).
NATIVE = {
    *("cast", "scale", "embedding", "dropout", "reshape", "transpose", "split", "split_with_num", "slice"),
    *("stack", "expand", "assign", "assign_out_", "full_", "unsqueeze", "squeeze", "flatten"),
    *("full_like", "empty_like", "reshape_", "scale_"),
}
METHODS = {
    "__add__": "add", "__radd__": "add", "__sub__": "subtract", "__rsub__": "subtract",
    "__mul__": "multiply", "__rmul__": "multiply", "__truediv__": "divide", "__rtruediv__": "divide",
    "__matmul__": "matmul", "__gt__": "greater_than", "__lt__": "less_than",
}  # fmt: skip


class _Cast:
    """What ``auto_cast`` says at the moment; None: nothing."""

    current: tuple[Any, set[str], set[str]] | None = None


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Low precision within; Paddle is as before after."""
    from ppfleetx.distributed.cpu import backend as cpu_backend
    from ppfleetx.nn import layers, norm
    from ppfleetx.parallel import mixed_precision

    cpu_backend.install()  # it keeps the operators that it finds
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(list(_operators())))
        for method, name in METHODS.items():
            wrapped = _wrap(name, getattr(paddle.Tensor, method))
            stack.enter_context(mock.patch.object(paddle.Tensor, method, wrapped))
        stack.enter_context(mock.patch.object(paddle.amp, "auto_cast", _auto_cast))
        stack.enter_context(mock.patch.object(mixed_precision, "has_kernels", lambda _: True))
        for module in (layers, norm):
            stack.enter_context(mock.patch.object(module, "trains_on_cpu", lambda _: False))
        yield


@contextlib.contextmanager
def _replaced(operators: Sequence[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """These operators in their places. There are thousands, so not one ``mock.patch`` for each."""
    before = [(module, name, vars(module)[name]) for module, name, _ in operators]
    try:
        for module, name, operator in operators:
            setattr(module, name, operator)
        yield
    finally:
        for module, name, operator in before:
            setattr(module, name, operator)


def _operators() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(module, name, replacement) wherever Paddle's Python holds an operator."""
    wrappers = {}
    for name, operator in vars(_C_ops).items():
        if isinstance(operator, types.BuiltinFunctionType) and name not in NATIVE:
            wrappers[id(operator)] = _adamw(operator) if name == "adamw_" else _wrap(name, operator)
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("paddle") and "libpaddle" not in module_name:
            for name, held in list(vars(module).items()):
                if isinstance(held, types.BuiltinFunctionType) and id(held) in wrappers:
                    yield module, name, wrappers[id(held)]


def observe(name: str, dtype: Any) -> None:
    """Told of each operator on 16-bit tensors, by its name on a GPU; to be replaced by who listens."""


def _wrap(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        written = kwargs.pop("out", None)
        if written is not None:
            paddle.assign(run(*args, **kwargs), written)
            return written
        types_in = {tensor.dtype for tensor in _tensors([*args, *kwargs.values()]) if tensor.dtype in FLOATS}
        if _Cast.current is not None and types_in:
            wanted = _wanted(name_on_gpu(name, args), types_in)
            if wanted is not None and types_in != {wanted}:
                args, kwargs = _map_all(args, kwargs, lambda t: t.astype(wanted) if t.dtype in FLOATS else t)
                types_in = {wanted}
        low = [dtype for dtype in types_in if dtype in LOW]
        if not low:
            return operator(*args, **kwargs)
        observe(name_on_gpu(name, args), paddle.float32 if paddle.float32 in types_in else low[0])
        if name.endswith("_"):
            return _in_place(name, operator, args, kwargs)
        args, kwargs = _map_all(args, kwargs, lambda t: t.astype("float32") if t.dtype in LOW else t)
        out = operator(*args, **kwargs)
        # Operands of two types give the wider one.
        return out if paddle.float32 in types_in else _map_out(out, low[0])

    return run


def _in_place(name: str, operator: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operator that writes into its first operand, a tensor or a list of tensors, and gives it back."""
    target, *rest = args
    written = list(_tensors([target]))
    traced = paddle.is_grad_enabled() and any(not tensor.stop_gradient for tensor in _tensors(args))
    assert not traced, f"{name} writes into a 16-bit tensor that is differentiated: not emulated"
    (copies, *rest), kwargs = _map_all(
        [target, *rest], kwargs, lambda t: t.astype("float32") if t.dtype in LOW else t
    )
    out = operator(copies, *rest, **kwargs)
    for tensor, copy in zip(written, _tensors([copies]), strict=True):
        if tensor.dtype in LOW:
            paddle.assign(copy.astype(tensor.dtype), tensor)
    return (target, *out[1:]) if isinstance(out, (list, tuple)) and len(out) else target


def name_on_gpu(name: str, args: Sequence[Any]) -> str:
    """What an operator of a CPU is called on a GPU, by which the lists of ``auto_cast`` know it.

    ``F.linear`` calls one operator on a CPU and two others on a GPU, with and without a bias.
    """
    if name != "linear":
        return name
    _, _, bias = args
    return "matmul" if bias is None else "linear_v2"


def _wanted(name: str, types_in: set[Any]) -> Any:
    """The type that the operands are cast to; None: they stay as they are."""
    low, white, black = _Cast.current
    if name in white:
        return low
    if name in black or paddle.float32 in types_in:
        return paddle.float32
    return None


def _adamw(operator: Callable[..., Any]) -> Callable[..., Any]:
    def adamw_(parameter: Any, gradient: Any, *args: Any) -> Any:
        *states, master, found_inf = args[:8]
        if master is None:
            return operator(parameter, gradient, *args)
        observe("adamw_", parameter.dtype)
        rest = list(args[8:])
        rest[8] = False  # multi_precision
        out = operator(master, gradient.astype("float32"), *states, None, found_inf, *rest)
        with paddle.no_grad():
            paddle.assign(master.astype(parameter.dtype), parameter)
        return out

    return adamw_


@contextlib.contextmanager
def _auto_cast(
    enable: bool = True,
    custom_white_list: Any = None,
    custom_black_list: Any = None,
    level: str = "O1",
    dtype: str = "float16",
) -> Iterator[None]:
    """Paddle's, as far as operators are concerned. Recomputation switches it off and on by what it finds in
    C++, where nothing is on here: what is on stays on."""
    outer = _Cast.current
    if enable:
        lists = importlib.import_module("paddle.amp.auto_cast")  # the function hides the module
        white, black = lists._update_list(custom_white_list, custom_black_list, level, dtype)
        _Cast.current = (getattr(paddle, dtype), white, black)
    try:
        yield
    finally:
        _Cast.current = outer


def _tensors(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, paddle.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _map(values: Sequence[Any], change: Callable[[Any], Any]) -> list[Any]:
    return [
        change(value)
        if isinstance(value, paddle.Tensor)
        else _map(value, change)
        if isinstance(value, (list, tuple))
        else value
        for value in values
    ]


def _map_all(
    args: Sequence[Any], kwargs: dict[str, Any], change: Callable[[Any], Any]
) -> tuple[list[Any], dict[str, Any]]:
    return _map(args, change), dict(zip(kwargs, _map(list(kwargs.values()), change), strict=True))


def _map_out(out: Any, dtype: Any) -> Any:
    if isinstance(out, paddle.Tensor):
        return out.astype(dtype) if out.dtype == paddle.float32 else out
    return type(out)(_map_out(part, dtype) for part in out) if isinstance(out, (list, tuple)) else out
