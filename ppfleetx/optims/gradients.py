"""Access to gradients, and clipping by the global norm. All code that reads, sums, scales or drops a gradient
uses this module.

The gradient of a parameter is ``grad`` or, for a 16-bit parameter whose gradient is accumulated in float32,
``main_grad``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import paddle
from paddle import Tensor, _C_ops

from ppfleetx.nn.fused_ops import NO_FUSED_OPS, FusedOps

_SMALL = 1 << 16
"""Gradients with fewer elements are concatenated before their norm is computed. On a GPU, a kernel launch for
each of them would take longer than the computation."""


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the parameter's gradient, to read or to change in place; None if there is none. A strided
    gradient is made contiguous, because collectives and multi-tensor kernels require this."""
    main = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if main is None else main
    return None if gradient is None else gradient.contiguous()


def complete_gradient(parameter: Tensor) -> Tensor:
    """Return the parameter's gradient. If it has none, return zeros. They also become its gradient, unless
    the parameter's memory has been freed (sharding stage 3)."""
    gradient = gradient_of(parameter)
    if gradient is not None:
        return gradient
    zeros = paddle.zeros(parameter.shape, getattr(parameter, "gradient_dtype", parameter.dtype))
    if parameter._is_initialized():
        add_gradient(parameter, zeros)
        return gradient_of(parameter)
    return zeros


def is_in_use(parameter: Tensor) -> bool:
    """Return whether training steps currently use the parameter. A parameter that is not in use gets no
    gradient, and reductions skip it. The result is the same on all ranks."""
    return not getattr(parameter, "is_idle", False)


def drop_gradient(parameter: Tensor) -> None:
    """Remove the parameter's gradient instead of setting it to zero. This saves an addition in the next
    backward pass."""
    if getattr(parameter, "main_grad", None) is not None:
        parameter.main_grad = None
    parameter.clear_gradient(False)


def add_to_main_gradient(parameter: Tensor) -> None:
    """Add the new gradient ``grad`` of a 16-bit parameter to its float32 gradient ``main_grad``, and drop
    ``grad``. Does nothing for a float32 parameter."""
    if parameter.grad is None or parameter.dtype == paddle.float32:
        return
    with paddle.no_grad():
        gradient = parameter.grad.astype("float32")
        main = getattr(parameter, "main_grad", None)
        parameter.main_grad = gradient if main is None else main.add_(gradient)
    parameter.clear_gradient(False)


def take_gradient(parameter: Tensor) -> Tensor:
    """Remove the gradient from the parameter and return it; zeros if the parameter has no gradient."""
    gradient = complete_gradient(parameter)
    if getattr(parameter, "main_grad", None) is None:
        # Dropping the gradient empties the tensor that `grad` returned. A new tensor keeps its memory.
        taken = paddle.empty(gradient.shape, gradient.dtype)
        gradient._share_buffer_to(taken)
        gradient = taken
    drop_gradient(parameter)
    return gradient


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add ``gradient`` to the parameter's gradient. If the parameter has no gradient, ``gradient`` itself
    becomes its gradient, without a copy."""
    with paddle.no_grad():
        there = gradient_of(parameter)
        if there is not None:
            there.add_(gradient)
        elif gradient.dtype == parameter.dtype:
            # Use the setter of `grad` the first time only, because it copies and synchronizes with the
            # device.
            holder = parameter._grad_value()
            if holder is None:
                parameter.grad = gradient
            else:
                holder._share_data_with(gradient.get_tensor())
        else:
            parameter.main_grad = gradient


# -- clipping


def squared_norm(params: Iterable[Tensor], ops: FusedOps = NO_FUSED_OPS) -> Tensor:
    """Return the sum of squares of all gradients, a float64 tensor of shape []. A tied parameter counts once;
    a parameter without a gradient counts as zero."""
    # The kernel sums each gradient in float32, block by block, which is accurate enough. The sum over
    # parameters is in float64, so that it does not depend on how the parameters are grouped.
    squares = squares_of(list(_gradients(params)), ops)
    if not squares:
        return paddle.zeros([], dtype="float64")
    return paddle.stack(squares).astype("float64").sum()


def squares_of(gradients: Sequence[Tensor], ops: FusedOps) -> list[Tensor]:
    """Return tensors of shape [] whose sum is the squared norm of all ``gradients``. There is one tensor per
    gradient. If the fused operator is in use, all small gradients share one tensor."""
    small = [grad for grad in gradients if grad.size < _SMALL]
    if len(small) > 1 and ops.takes("grad_norm", *small):
        joined = paddle.concat([grad.reshape([-1]) for grad in small])
        gradients = [*(grad for grad in gradients if grad.size >= _SMALL), joined]
    return [_C_ops.squared_l2_norm(grad).reshape([]) for grad in gradients]


def scale_all(gradients: Sequence[Tensor], factor: float, ops: FusedOps) -> None:
    """Multiply all ``gradients`` by ``factor`` in place."""
    with paddle.no_grad():
        if len(gradients) > 1 and ops.takes("grad_scale", *gradients):
            # The operator divides by its argument, a loss scale.
            _C_ops.check_finite_and_unscale_(list(gradients), paddle.full([1], 1.0 / factor))
            return
        for gradient in gradients:
            gradient.scale_(factor)


def scale_to_norm(
    params: Iterable[Tensor], norm: float, max_norm: float | None, ops: FusedOps = NO_FUSED_OPS
) -> None:
    """Clip the gradients in place to the global norm ``max_norm``. ``norm`` is their current global norm.
    Gradients stay unchanged if ``max_norm`` is None or 0, or if ``norm`` is not finite."""
    # Scaling by a norm that is not finite would hide the bad gradient from the caller.
    if not max_norm or not math.isfinite(norm):
        return
    # Megatron's factor
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
