"""Access to a parameter's gradient: ``grad``, or the float32 ``main_grad`` of a 16-bit parameter.

A 16-bit parameter may keep its gradient in float32 in ``main_grad`` (the attribute that Paddle's own
optimizers use); ``grad`` is then empty between backward passes. All code that reads, sums, scales or drops a
gradient uses this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paddle import Tensor


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
    import paddle

    gradient = gradient_of(parameter)
    if gradient is not None:
        return gradient
    zeros = paddle.zeros(parameter.shape, getattr(parameter, "gradient_dtype", parameter.dtype))
    if parameter._is_initialized():
        add_gradient(parameter, zeros)
        return gradient_of(parameter)
    return zeros


def expects_gradient(parameter: Tensor) -> bool:
    """Whether a step computes with the parameter. The answer is the same on all ranks, whatever their
    data."""
    return not getattr(parameter, "is_idle", False)


def drop_gradient(parameter: Tensor) -> None:
    """Free the gradient. It is not set to zero, so the next backward pass writes without adding."""
    if getattr(parameter, "main_grad", None) is not None:
        parameter.main_grad = None
    parameter.clear_gradient(False)


def add_to_main_gradient(parameter: Tensor) -> None:
    """Add ``grad`` to the float32 ``main_grad``, and drop it. A float32 parameter keeps its ``grad``."""
    import paddle

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
    import paddle

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
    import paddle

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
