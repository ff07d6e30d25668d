"""Run the branches of a GPU on a CPU.

Where a CPU lacks a GPU's operator or its element type, a stand-in computes the result with other operators
and records the operator's name.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import paddle
import paddle.nn.functional as F
from paddle import _C_ops
from paddle.base import core

from ppfleetx.distributed import host_device_copy
from ppfleetx.distributed.cpu.patches import TABLE
from ppfleetx.nn import attention_kernels, flash, fused_ops, quantized
from tests.helpers import low_precision

GRADIENTS_OF = (
    "c_softmax_with_cross_entropy",
    "flash_attn",
    "flashmask_attention",
    "linear_v2",
)
"""Operators that only stand-ins name, and that have one for their gradients."""


class Named:
    """Records the operators that stand-ins replace, and copies queued for the GPU.

    Attributes:
        calls: calls of each (operator, element type).
        queued: copies to the GPU without a wait.
    """

    def __init__(self) -> None:
        self.calls, self.queued = Counter[tuple[str, str]](), 0
        self._inside = False

    def add(self, name: str, dtype: Any) -> None:
        """Record a call, unless a stand-in made it."""
        if not self._inside:
            self.calls[name, str(dtype).removeprefix("paddle.")] += 1

    @contextlib.contextmanager
    def stand_in(self, name: str, dtype: Any) -> Iterator[None]:
        """Context manager: record an operator; calls inside it are not recorded."""
        self.add(name, dtype)
        outer, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = outer


@contextlib.contextmanager
def gpu_branches(named: Named, *, low: bool = False) -> Iterator[None]:
    """Context manager in which ppfleetx takes the branches of a GPU of capability 8.0.

    Args:
        named: records the operators that stand-ins replace.
        low: whether 16-bit types are emulated (tests/helpers/low_precision.py).
    """

    def queue(array: Any) -> paddle.Tensor:
        named.queued += 1
        return paddle.to_tensor(array)

    with contextlib.ExitStack() as stack:
        patch = lambda *of: stack.enter_context(mock.patch.object(*of))  # noqa: E731
        patch(core.Place, "is_cpu_place", lambda _: False)
        patch(host_device_copy, "on_card", lambda: True)
        patch(host_device_copy, "_queue", queue)
        patch(host_device_copy, "queue_copy_to_host", lambda tensor: tensor)
        patch(host_device_copy, "recorded_event", lambda: SimpleNamespace(query=lambda: True))
        for module in (flash, quantized):
            patch(module, "on_gpu", lambda: True)
        patch(attention_kernels, "on_card", lambda: True)
        patch(flash, "_capability", lambda _: (8, 0))
        patch(quantized, "capability", lambda _: (8, 0))
        patch(quantized, "weight_quantize", _weight_quantize(named))
        patch(quantized, "weight_only_linear", _weight_only_linear(named))
        patch(
            fused_ops,
            "TABLE",
            {name: replace(row, exact_on_cpu=True) for name, row in fused_ops.TABLE.items()},
        )
        fused_ops.forget_trials()
        stack.callback(fused_ops.forget_trials)
        patch(F.flash_attention, "flash_attention", _flash(named, "flash_attn"))
        patch(F.flash_attention, "flashmask_attention", _flash(named, "flashmask_attention"))
        if low:
            stack.enter_context(low_precision.emulated())
            patch(low_precision, "observe", named.add)
        else:
            patch(_C_ops, "linear", _linear(named, _C_ops.linear))
        for entry in TABLE:
            if entry.owner == "paddle._C_ops":
                patch(_C_ops, entry.name, _naming(named, entry.name, getattr(_C_ops, entry.name)))
        yield


def _linear(named: Named, original: Callable[..., Any]) -> Callable[..., Any]:
    """Stand-in for the operator of ``F.linear`` on a GPU. The CPU's kernel of that name (3.3.1) ends the
    process."""

    def linear(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
        with nullcontext() if bias is None else named.stand_in("linear_v2", x.dtype):
            return original(x, weight, bias)

    return linear


def _weight_quantize(named: Named) -> Callable[..., Any]:
    def quantize(wide: paddle.Tensor, algo: str, arch: int) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the matrix itself as integers, and scales of 1."""
        with named.stand_in("weight_quantize", wide.dtype):
            return wide, paddle.ones([wide.shape[1]], wide.dtype)

    return quantize


def _weight_only_linear(named: Named) -> Callable[..., Any]:
    def multiply(x: Any, weight: Any, bias: Any, scale: Any, dtype: str, arch: int) -> paddle.Tensor:
        with named.stand_in("weight_only_linear", x.dtype):
            product = paddle.matmul(x, weight) * scale
            return product if bias is None else product + bias

    return multiply


def _naming(named: Named, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with named.stand_in(name, args[0].dtype):
            return original(*args, **kwargs)

    return call


def _flash(named: Named, name: str) -> Callable[..., Any]:
    """Attention without a mask: it has the right shapes and is differentiable."""

    def attend(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        with named.stand_in(name, query.dtype):
            copies = query.shape[2] // key.shape[2]
            key, value = (paddle.stack([t] * copies, axis=3).flatten(2, 3) for t in (key, value))
            query, key, value = (t.transpose([0, 2, 1, 3]) for t in (query, key, value))
            out = paddle.matmul(F.softmax(paddle.matmul(query, key, transpose_y=True)), value)
            out = out.transpose([0, 2, 1, 3])
        return (out, None) if name == "flash_attn" else out

    return attend
