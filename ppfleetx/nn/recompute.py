"""Activation recomputation: activations are dropped in the forward pass and computed again in the backward
pass.

Granularity ``full`` keeps only a block's input; ``full_attn`` drops the activations of attention and its
projections; ``core_attn`` drops only scores, softmax and context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from itertools import count
from typing import Any

import paddle


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function without keeping its activations. The backward pass runs the function again, with the
    same random numbers and context variables.

    Args:
        function: a function whose result depends only on ``args``, parameters and random numbers.
        args: tensors or None; at least one tensor must require a gradient.
    """
    from paddle.distributed.fleet.utils import recompute as fleet_recompute

    context, runs = copy_context(), count()

    # A plain function, because fleet rejects signatures with keyword-only parameters. A partial with a
    # keyword argument has such a signature.
    def run(*given: Any) -> Any:
        return context.run(_again, function, given) if next(runs) else function(*given)

    return fleet_recompute(run, *args)


def is_recomputing() -> bool:
    """Return whether the running code is being recomputed in a backward pass."""
    return _RECOMPUTING.get()


def _again(function: Callable[..., Any], given: Sequence[Any]) -> Any:
    _RECOMPUTING.set(True)  # only in the copied context
    return function(*given)


_RECOMPUTING: ContextVar[bool] = ContextVar("recomputing", default=False)


def may_recompute(layer: paddle.nn.Layer) -> bool:
    """Return whether the layer is in training mode and gradients are enabled, as recomputation requires."""
    return layer.training and paddle.is_grad_enabled()
