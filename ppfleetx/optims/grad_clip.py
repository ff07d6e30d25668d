"""Clipping of gradients by their global L2 norm.

Paddle's own kernel computes the squared norm of each gradient in float32. (On a CPU it runs at memory speed
and sums in blocks, so 40 million elements lose no digits; a plain dot product loses three.) The squared norms
of all parameters are added in float64, so the sum does not depend on the grouping of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ppfleetx.nn.fused import NO_FUSED_OPS, FusedOps
from ppfleetx.optims.gradients import gradient_of

if TYPE_CHECKING:
    from paddle import Tensor

_SMALL = 1 << 16
"""A gradient with fewer elements takes less time for its norm than for the launch on a GPU."""


def squared_norm(params: Iterable[Tensor], ops: FusedOps = NO_FUSED_OPS) -> Tensor:
    """The sum of squares of all gradients, a float64 tensor of shape [].

    A parameter that occurs twice (tied) counts once; a parameter without a gradient counts as zero.
    """
    import paddle

    squares = squares_of(list(_gradients(params)), ops)
    if not squares:
        return paddle.zeros([], dtype="float64")
    return paddle.stack(squares).astype("float64").sum()


def squares_of(gradients: Sequence[Tensor], ops: FusedOps) -> list[Tensor]:
    """Return squared norms of shape [] whose sum is the squared norm of all ``gradients``."""
    import paddle
    from paddle import _C_ops

    small = [grad for grad in gradients if grad.size < _SMALL]
    if len(small) > 1 and ops.takes("grad_norm", *small):
        joined = paddle.concat([grad.reshape([-1]) for grad in small])
        gradients = [*(grad for grad in gradients if grad.size >= _SMALL), joined]
    return [_C_ops.squared_l2_norm(grad).reshape([]) for grad in gradients]


def scale_all(gradients: Sequence[Tensor], factor: float, ops: FusedOps) -> None:
    """Multiply all ``gradients`` by ``factor`` in place."""
    import paddle
    from paddle import _C_ops

    with paddle.no_grad():
        if len(gradients) > 1 and ops.takes("grad_scale", *gradients):
            # The operator divides, like mixed precision does by the loss scale.
            _C_ops.check_finite_and_unscale_(list(gradients), paddle.full([1], 1.0 / factor))
            return
        for gradient in gradients:
            gradient.scale_(factor)


def scale_to_norm(
    params: Iterable[Tensor], norm: float, max_norm: float | None, ops: FusedOps = NO_FUSED_OPS
) -> None:
    """Scale all gradients in place so that their global norm, given as ``norm``, is at most ``max_norm``.

    The factor is ``max_norm / (norm + 1e-6)``, applied if it is below 1 (Megatron). If ``max_norm`` is None
    or 0, the gradients do not change. A norm that is not finite does not change them either: the caller
    decides whether to skip the step or stop, and scaling would hide the bad gradient.
    """
    if not max_norm or not math.isfinite(norm):
        return
    coefficient = max_norm / (norm + 1e-6)
    if coefficient < 1.0:
        found = [gradient_of(param) for param in _unique(params)]
        scale_all([gradient for gradient in found if gradient is not None], coefficient, ops)


def _unique(params: Iterable[Tensor]) -> list[Tensor]:
    return list({id(param): param for param in params}.values())


def _gradients(params: Iterable[Tensor]) -> Iterable[Tensor]:
    import paddle

    for param in _unique(params):
        grad = gradient_of(param)
        if grad is not None:
            # 16-bit gradients have no kernel on a CPU, and 16-bit sums overflow.
            yield grad if grad.dtype == paddle.float32 else grad.astype("float32")
