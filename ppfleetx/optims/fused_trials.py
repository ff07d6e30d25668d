"""Trials that compare the optimizer's fused operators with the unfused operators on a few small tensors."""

from __future__ import annotations

import numpy as np
import paddle

from ppfleetx.nn.fused_ops import FusedOps
from ppfleetx.nn.fused_trial_process import Pairs
from ppfleetx.optims.adamw import STATES, fused_adamw
from ppfleetx.optims.adamw import adamw as adamw_of_one
from ppfleetx.optims.gradients import scale_all, squares_of
from ppfleetx.optims.rule import ParamView

_SHAPES = ([3, 5], [7], [64, 33], [1], [4096])
_BETAS, _EPSILON, _LR = (0.9, 0.95), 1e-8, 1e-3


def adamw(dtype: str) -> Pairs:
    """Run the same AdamW steps with the fused multi-tensor kernel and with the single-tensor kernel. Yield
    pairs (fused result, unfused result) to compare."""
    generator = np.random.default_rng(0)
    lr = paddle.full([1], _LR)
    start = [generator.standard_normal(shape).astype(dtype) for shape in _SHAPES]
    fused, plain = _fresh_states(start), _fresh_states(start)
    for weight_decay in (0.1, 0.0, 0.1):
        gradients = [paddle.to_tensor(generator.standard_normal(s).astype(dtype)) for s in _SHAPES]
        values, *states = zip(*fused, strict=True)
        fused_adamw(
            values, gradients, lr, tuple(states), betas=_BETAS, epsilon=_EPSILON, weight_decay=weight_decay
        )
        for (value, *states), gradient in zip(plain, gradients, strict=True):
            view = ParamView("", None, value, gradient, dict(zip(STATES, states, strict=True)))
            adamw_of_one(view, lr, betas=_BETAS, epsilon=_EPSILON, weight_decay=weight_decay)
    for ours, theirs in zip(fused, plain, strict=True):
        yield from zip(ours, theirs, strict=True)


def _fresh_states(start: list[np.ndarray]) -> list[tuple[paddle.Tensor, ...]]:
    """Return new AdamW tensors for each initial value in ``start``: (parameter, first moment, second moment,
    power of beta1, power of beta2). The powers are in host memory."""
    states = []
    for value in start:
        powers = [paddle.full([1], beta).cpu() for beta in _BETAS]
        states.append((paddle.to_tensor(value), *(paddle.zeros(value.shape) for _ in _BETAS), *powers))
    return states


def grad_norm(dtype: str) -> Pairs:
    gradients = _gradients(dtype)
    fused, plain = (squares_of(gradients, ops) for ops in (FusedOps({"grad_norm": [dtype]}), FusedOps()))
    yield sum(fused), sum(plain)


def grad_scale(dtype: str) -> Pairs:
    fused, plain = _gradients(dtype), _gradients(dtype)
    scale_all(fused, 0.37, FusedOps({"grad_scale": [dtype]}))
    scale_all(plain, 0.37, FusedOps())
    yield from zip(fused, plain, strict=True)


def _gradients(dtype: str) -> list[paddle.Tensor]:
    generator = np.random.default_rng(0)
    return [paddle.to_tensor(generator.standard_normal(shape).astype(dtype)) for shape in _SHAPES]
