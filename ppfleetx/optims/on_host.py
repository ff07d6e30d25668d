"""Update parameters of a device on the CPU, with states in host memory.

A rule gets copies of parameters and gradients in host memory, one parameter at a time. The copy of a 16-bit
parameter is its float32 master weight, which is kept; the copy of a float32 parameter is made for each
update.
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
    """Copy a tensor to host memory, even if it is already there, where ``Tensor.cpu`` returns the tensor
    itself."""
    return tensor.detach()._copy_to(paddle.CPUPlace(), True)


@contextmanager
def made_on_host() -> Iterator[None]:
    device = paddle.get_device()
    paddle.set_device("cpu")
    try:
        yield
    finally:
        paddle.set_device(device)


def update_on_host(rule: Rule, view: ParamView, *, lr: float, weight_decay: float) -> None:
    with made_on_host():
        value = copy_to_host(view.value) if view.rounded is None else view.value
        here = replace(view, value=value, gradient=copy_to_host(view.gradient), rounded=None)
        rule.update([here], lr=lr, weight_decay=weight_decay)
    parameter = view.value if view.rounded is None else view.rounded
    # Round here, so that only 16 bits are sent. copy_ keeps the parameter's place and memory.
    parameter.copy_(value.astype(parameter.dtype), True)
