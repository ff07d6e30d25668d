"""Sleep in the place of computing: passes that take their time but need no core."""

from __future__ import annotations

import time
from typing import Any

import paddle
from paddle.autograd import PyLayer


def let_sleep(block: Any, *, forward: float, backward: float) -> None:
    """From now on each forward pass of ``block``, a layer of the trunk, takes ``forward`` seconds longer, and
    each backward pass ``backward`` seconds."""
    block.register_forward_post_hook(
        lambda _, __, state: (_Pause.apply(state[0], forward, backward), *state[1:])
    )


class _Pause(PyLayer):
    @staticmethod
    def forward(ctx: Any, hidden: paddle.Tensor, forward: float, backward: float) -> paddle.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> paddle.Tensor:
        time.sleep(ctx.seconds)
        return upstream
