"""Stochastic gradient descent on float32 master weights."""

from __future__ import annotations

from typing import Any

import paddle


class MasterSGD(paddle.optimizer.SGD):
    """Paddle's SGD for 16-bit parameters whose gradients are float32, which its GPU kernel does not take."""

    @paddle.no_grad()
    def _append_optimize_op(self, block: Any, param_and_grad: tuple[paddle.Tensor, paddle.Tensor]) -> None:
        parameter, gradient = param_and_grad
        master = self._master_weights.get(parameter.name)
        if master is None:
            super()._append_optimize_op(block, param_and_grad)
            return
        master.subtract_(gradient.astype("float32") * self._create_param_lr(param_and_grad))
        paddle.assign(master.astype(parameter.dtype), parameter)
