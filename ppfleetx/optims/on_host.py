"""Updates on the CPU of parameters on a device, with states in host memory.

A rule is given copies on the host in the place of parameters and gradients, one parameter at a time. A 16-bit
parameter's copy is its float32 master weight, which stays; a float32 parameter's is made for each update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import paddle

if TYPE_CHECKING:
    from ppfleetx.optims.rule import ParamView, Rule


def copy_to_host(tensor: paddle.Tensor) -> paddle.Tensor:
    """Copy a tensor to host memory, even if it is there already (``Tensor.cpu`` then returns the tensor
    itself)."""
    return tensor.detach()._copy_to(paddle.CPUPlace(), True)


@contextmanager
def made_on_host() -> Iterator[None]:
    """Context manager in which Paddle creates tensors in host memory."""
    device = paddle.get_device()
    paddle.set_device("cpu")
    try:
        yield
    finally:
        paddle.set_device(device)


def update_on_host(rule: Rule, view: ParamView, *, lr: float, weight_decay: float) -> None:
    """Update one parameter, whose master weight and states are in host memory."""
    with made_on_host():
        value = copy_to_host(view.value) if view.rounded is None else view.value
        here = replace(view, value=value, gradient=copy_to_host(view.gradient), rounded=None)
        rule.update([here], lr=lr, weight_decay=weight_decay)
    parameter = view.value if view.rounded is None else view.rounded
    # Rounded here, so that 16 bits travel; copy_ keeps the place and memory of the parameter.
    parameter.copy_(value.astype(parameter.dtype), True)
