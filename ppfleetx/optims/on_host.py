"""Optimizers whose states are in host memory: the update of parameters on a device runs on the CPU.

The optimizer itself is Paddle's. It is handed copies on the host in the place of parameters and gradients,
one parameter at a time, and so makes its states there; what it wrote is copied back. A 16-bit parameter's
copy is its float32 master weight, which stays; a float32 parameter's is made for each update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import paddle


def copy_to_host(tensor: paddle.Tensor) -> paddle.Tensor:
    """A copy in host memory, also of what is there already (where ``Tensor.cpu`` gives the tensor itself)."""
    return tensor.detach()._copy_to(paddle.CPUPlace(), True)


@contextmanager
def _made_on_host() -> Iterator[None]:
    """Within, Paddle makes new tensors (states, the learning rate) in host memory."""
    device = paddle.get_device()
    paddle.set_device("cpu")
    try:
        yield
    finally:
        paddle.set_device(device)


class OnHost:
    """Goes before one of Paddle's optimizers, which then never sees a tensor on a device.

    Copies bear the parameter's name: by it the optimizer finds states and the choice of weight decay.
    The optimizer is made without ``multi_precision``, as all it sees is float32.
    """

    def set_lr(self, value: float) -> None:
        with _made_on_host():
            super().set_lr(value)

    def _gen_master_weight_var_name(self, param: paddle.Tensor) -> str:
        return param.name

    def _create_accumulators(self, block: Any, parameters: Sequence[paddle.Tensor]) -> None:
        new = [p for p in parameters if p.name not in self._already_create_accumulator]
        with _made_on_host():
            for parameter in new:
                super()._create_accumulators(block, [self._value_of(parameter)])

    def _apply_optimize(
        self,
        loss: Any,
        startup_program: Any,
        params_grads: Sequence[tuple[paddle.Tensor, paddle.Tensor]],
        param_group_idx: int = 0,
    ) -> None:
        with _made_on_host():
            for parameter, gradient in params_grads:
                value = self._value_of(parameter)
                pair = (value, copy_to_host(gradient))
                super()._apply_optimize(loss, startup_program, [pair], param_group_idx)
                # Rounded here, so that 16 bits travel; copy_ keeps the place and memory of the parameter.
                parameter.copy_(value.detach().astype(parameter.dtype), True)

    def _value_of(self, parameter: paddle.Tensor) -> paddle.Tensor:
        """What is updated in the parameter's place: its master weight, or a copy of now."""
        value = self._master_weights.get(parameter.name)
        if value is None:
            value = copy_to_host(parameter)
            value.name = parameter.name
        value.stop_gradient = False  # others are passed over
        return value


class HostAdamW(OnHost, paddle.optimizer.AdamW):
    """Paddle's AdamW, on the CPU."""


class HostSGD(OnHost, paddle.optimizer.SGD):
    """Paddle's SGD, on the CPU; its only state are the master weights of 16-bit parameters."""
