"""Recomputation: drop activations in the forward pass, and compute them again in the backward pass.

From least memory to least extra work: ``full`` keeps a layer's input only, ``full_attn`` forgets the
attention sub-block (projections included), ``core_attn`` forgets scores, softmax and context only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from itertools import count
from typing import Any

import paddle


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function without keeping activations, and run it again in the backward pass with the same
    random numbers and context variables.

    Args:
        function: pure but for its parameters and random numbers; any callable that takes ``args``.
        *args: tensors or None, positional; at least one tensor carries a gradient.
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
    """Whether recomputation applies: there will be a backward pass."""
    return layer.training and paddle.is_grad_enabled()
