"""Recomputation: drop activations in the forward pass, and compute them again in the backward pass.

From least memory to least extra work: ``full`` keeps only a layer's input, ``full_attn`` drops the attention
sub-block (including projections), ``core_attn`` drops only scores, softmax and context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from itertools import count
from typing import Any

import paddle


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function without keeping activations, and run it again in the backward pass with the same random
    numbers and context variables.

    The function must be pure except for its parameters and random numbers. ``args`` are tensors or None, and
    at least one tensor has a gradient.
    """
    from paddle.distributed.fleet.utils import recompute as fleet_recompute

    context, runs = copy_context(), count()

    # fleet reads the signature of what it is given, and refuses keyword-only parameters, which every partial
    # with a keyword has.
    def run(*given: Any) -> Any:
        return context.run(_again, function, given) if next(runs) else function(*given)

    return fleet_recompute(run, *args)


def is_recomputing() -> bool:
    """Whether the current code is the second run, in the backward pass."""
    return _RECOMPUTING.get()


def _again(function: Callable[..., Any], given: Sequence[Any]) -> Any:
    _RECOMPUTING.set(True)  # in the copied context alone
    return function(*given)


_RECOMPUTING: ContextVar[bool] = ContextVar("recomputing", default=False)


def may_recompute(layer: paddle.nn.Layer) -> bool:
    """Whether recomputation applies, because there will be a backward pass."""
    return layer.training and paddle.is_grad_enabled()
