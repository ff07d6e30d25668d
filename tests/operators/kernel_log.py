"""The kernels that Paddle runs, by element type, from Paddle's own log."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator

from paddle.base import core

# Paddle's names of operators whose kernel is called otherwise.
KERNEL_OF = {"div_scale": "scale", "arange": "arange_tensor", "assign_out": "assign"}
# Operators that only describe memory anew where tensors have strides; a copy they need is logged by itself.
VIEWS = frozenset(
    ("as_strided", "flatten", "reshape", "slice", "split", "split_with_num", "squeeze", "transpose", "unbind")
) | {"unsqueeze", "view_dtype", "view_shape"}
VIEWS |= {f"{name}_grad" for name in ("flatten", "reshape", "squeeze", "transpose", "unsqueeze")}
_MODULES = ("*api*", "data_transform")
# A place in Paddle that logs looks its level up once, and follows it only when it was named by then. So this
# module is imported before the process runs an operator.
core.set_vlog_level(dict.fromkeys(_MODULES, 0))
_KEY = re.compile(r"\] (?:(\w+) API kernel key: \[\w+, [\w()]+, (\w+)\]|(Trans2Contiguous))")


class KernelLog:
    """Counts calls in the context :meth:`recording`.

    Attributes:
        calls: calls of each (operator, element type of its key) that a kernel was chosen for.
        copies: implicit copies of strided tensors for kernels that need contiguous inputs.
    """

    def __init__(self) -> None:
        self.calls, self.copies = Counter[tuple[str, str]](), 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager that counts. Standard error goes to a file inside it."""
        with tempfile.TemporaryFile() as file:
            sys.stderr.flush()
            before = os.dup(2)
            os.dup2(file.fileno(), 2)
            core.set_vlog_level(dict.fromkeys(_MODULES, 6))
            try:
                yield
            finally:
                core.set_vlog_level(dict.fromkeys(_MODULES, 0))
                os.dup2(before, 2)
                os.close(before)
                file.seek(0)
                self.read(file.read().decode(errors="replace"))

    def read(self, text: str) -> None:
        """Count the calls in a log."""
        for operator, dtype, copy in _KEY.findall(text):
            if operator:
                self.calls[operator, dtype] += 1
            self.copies += bool(copy)


def kernel_of(operator: str) -> str:
    """The registered kernel of an operator."""
    name = operator.rstrip("_")
    return KERNEL_OF.get(name, name)
