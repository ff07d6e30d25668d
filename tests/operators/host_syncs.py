"""Count the calls with which a program waits for the device or copies to it, on a CPU."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import paddle
from paddle.base import core

from ppfleetx.resilience.flight_recorder import RECORD
from tests.operators.kernel_log import KernelLog, kernel_of

ROOT = str(Path(__file__).resolve().parents[2] / "ppfleetx") + "/"
_PASSED_OVER = ("/distributed/cpu/", "/distributed/host_device_copy.py", "/resilience/")
READS = ("numpy", "item", "tolist", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__")
# Kernels that bring the size of their result to the host.
WAITING = ("bincount", "masked_select", "nonzero", "unique", "unique_consecutive")


class HostSyncs:
    """Counts in the context :meth:`watching`, by the line of ppfleetx that causes them.

    Attributes:
        reads: copies from device to host, which wait for the device.
        copies: copies from pageable memory to the device, which wait too. Those of
            ppfleetx/distributed/host_device_copy.py do not wait and are not counted.
        collectives: collectives and messages to other ranks.
    """

    def __init__(self) -> None:
        self.reads, self.copies, self.collectives = Counter[str](), Counter[str](), Counter[str]()
        self._depth = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in READS:
                counted = self._counted(getattr(paddle.Tensor, name), self.reads, name)
                stack.enter_context(mock.patch.object(paddle.Tensor, name, counted))
            for owner, name in ((paddle, "to_tensor"), (paddle.Tensor, "set_value")):
                counted = self._counted(getattr(owner, name), self.copies, name)
                stack.enter_context(mock.patch.object(owner, name, counted))
            stack.enter_context(mock.patch.object(paddle.Tensor, "_copy_to", self._copied()))
            stack.enter_context(mock.patch.object(RECORD, "begin", self._begin(RECORD.begin)))
            yield

    def add_kernels(self, log: KernelLog) -> None:
        """Count kernels of ``log`` that wait for the device as reads."""
        for (operator, _), count in log.calls.items():
            if kernel_of(operator) in WAITING:
                self.reads[f"kernel {kernel_of(operator)}"] += count

    def totals(self) -> dict[str, int]:
        return {name: getattr(self, name).total() for name in ("reads", "copies", "collectives")}

    def places(self) -> dict[str, dict[str, int]]:
        """The counts by place."""
        return {name: dict(getattr(self, name)) for name in ("reads", "copies", "collectives")}

    def _counted(self, original: Callable[..., Any], counter: Counter[str], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            queued = name == "to_tensor" and sys._getframe(1).f_code.co_name in ("queue", "_queue")
            if (
                self._depth == 0
                and not queued
                and not (name == "to_tensor" and isinstance(args[0], paddle.Tensor))
            ):
                counter[f"{name} {caller()}"] += 1
            self._depth += 1  # one call may use another
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def _copied(self) -> Callable[..., Any]:
        """``Tensor._copy_to``, a read if it goes to the host, else a copy if it blocks."""
        original = paddle.Tensor._copy_to
        read = self._counted(original, self.reads, "_copy_to")
        copy = self._counted(original, self.copies, "_copy_to")

        def call(tensor: paddle.Tensor, place: Any, blocking: bool) -> Any:
            if isinstance(place, core.CPUPlace):
                return read(tensor, place, blocking)
            return (copy if blocking else original)(tensor, place, blocking)

        return call

    def _begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(operation: str, *args: Any) -> Any:
            self.collectives[f"{operation} {caller()}"] += 1
            return original(operation, *args)

        return begin


def caller() -> str:
    """The innermost line of ppfleetx on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(ROOT) and not any(part in path for part in _PASSED_OVER):
            return f"{path.removeprefix(ROOT)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"
