"""A parameter's gradient: ``grad``, or the float32 ``main_grad`` of a 16-bit parameter; and its clipping.

A 16-bit parameter may keep its gradient in float32 in ``main_grad`` (the attribute that Paddle's own
optimizers use); ``grad`` is then empty between backward passes. All code that reads, sums, scales or drops a
gradient uses this module.

Gradients are clipped by their global L2 norm. Paddle's own kernel computes the squared norm of each gradient
in float32. (On a CPU it runs at memory speed and sums in blocks, so 40 million elements lose no digits; a
plain dot product loses three.) The squared norms of all parameters are added in float64, so the sum does not
depend on the grouping of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import paddle
from paddle import Tensor, _C_ops

from ppfleetx.nn.fused import NO_FUSED_OPS, FusedOps

_SMALL = 1 << 16
"""A gradient with fewer elements takes less time for its norm than for the launch on a GPU."""


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient as a contiguous tensor, to read or change in place; None if the parameter has none.

    The backward pass may produce a strided gradient, which collectives and operators that write into lists of
    tensors cannot handle. In this case Paddle moves the tensor itself.
    """
    main = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if main is None else main
    return None if gradient is None else gradient.contiguous()


def complete_gradient(parameter: Tensor) -> Tensor:
    """Return the gradient, or create zeros if no pass produced one."""
    gradient = gradient_of(parameter)
    if gradient is not None:
        return gradient
    zeros = paddle.zeros(parameter.shape, getattr(parameter, "gradient_dtype", parameter.dtype))
    if parameter._is_initialized():
        add_gradient(parameter, zeros)
        return gradient_of(parameter)
    return zeros


def expects_gradient(parameter: Tensor) -> bool:
    """Whether a step computes with the parameter. All ranks agree, whatever their data."""
    return not getattr(parameter, "is_idle", False)


def drop_gradient(parameter: Tensor) -> None:
    """Free the gradient. It is not set to zero, so the next backward pass writes without adding."""
    if getattr(parameter, "main_grad", None) is not None:
        parameter.main_grad = None
    parameter.clear_gradient(False)


def add_to_main_gradient(parameter: Tensor) -> None:
    """Add ``grad`` to the float32 ``main_grad``, and drop it. A float32 parameter keeps its ``grad``."""
    if parameter.grad is None or parameter.dtype == paddle.float32:
        return
    with paddle.no_grad():
        gradient = parameter.grad.astype("float32")
        main = getattr(parameter, "main_grad", None)
        parameter.main_grad = gradient if main is None else main.add_(gradient)
    parameter.clear_gradient(False)


def take_gradient(parameter: Tensor) -> Tensor:
    """Return :func:`complete_gradient` and remove it from the parameter. The next backward pass makes a
    new one."""
    gradient = complete_gradient(parameter)
    if getattr(parameter, "main_grad", None) is None:
        # Dropping empties the tensor that `grad` returns, so another tensor must hold the memory.
        taken = paddle.empty(gradient.shape, gradient.dtype)
        gradient._share_buffer_to(taken)
        gradient = taken
    drop_gradient(parameter)
    return gradient


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add ``gradient`` to the parameter's gradient; if there is none, use the tensor itself."""
    with paddle.no_grad():
        there = gradient_of(parameter)
        if there is not None:
            there.add_(gradient)
        elif gradient.dtype == parameter.dtype:
            # Set `grad` the first time only: its setter copies, and makes the host wait for the card.
            holder = parameter._grad_value()
            if holder is None:
                parameter.grad = gradient
            else:
                holder._share_data_with(gradient.get_tensor())
        else:
            parameter.main_grad = gradient


# -- clipping


def squared_norm(params: Iterable[Tensor], ops: FusedOps = NO_FUSED_OPS) -> Tensor:
    """The sum of squares of all gradients, a float64 tensor of shape [].

    A parameter that occurs twice (tied) counts once; a parameter without a gradient counts as zero.
    """
    squares = squares_of(list(_gradients(params)), ops)
    if not squares:
        return paddle.zeros([], dtype="float64")
    return paddle.stack(squares).astype("float64").sum()


def squares_of(gradients: Sequence[Tensor], ops: FusedOps) -> list[Tensor]:
    """Return squared norms of shape [] whose sum is the squared norm of all ``gradients``."""
    small = [grad for grad in gradients if grad.size < _SMALL]
    if len(small) > 1 and ops.takes("grad_norm", *small):
        joined = paddle.concat([grad.reshape([-1]) for grad in small])
        gradients = [*(grad for grad in gradients if grad.size >= _SMALL), joined]
    return [_C_ops.squared_l2_norm(grad).reshape([]) for grad in gradients]


def scale_all(gradients: Sequence[Tensor], factor: float, ops: FusedOps) -> None:
    """Multiply all ``gradients`` by ``factor`` in place."""
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
    for param in _unique(params):
        grad = gradient_of(param)
        if grad is not None:
            # 16-bit gradients have no kernel on a CPU, and 16-bit sums overflow.
            yield grad if grad.dtype == paddle.float32 else grad.astype("float32")
