"""AdamW that updates all float32 parameters of one decay in one call.

Paddle's own AdamW calls a kernel for each parameter: a dozen launches a block on a GPU, most of them for
vectors that are done before the next launch arrives. ``fused_adam_`` takes lists of tensors, and on a GPU
packs up to 60 of them, or 320 chunks, into one launch. States stay one tensor a parameter: checkpoints,
sharding and names see no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import _C_ops

from ppfleetx.distributed.device import moves_powers

Pair = tuple[paddle.Tensor, paddle.Tensor]

_CHUNK = 1 << 16
"""Elements that one block of threads works through."""
_LARGEST = (1 << 31) - 1
"""The kernel counts a tensor's elements in 32 bits."""


class FusedAdamW(paddle.optimizer.AdamW):
    """Paddle's AdamW, with one kernel for many parameters where that is possible.

    16-bit parameters go one by one: their gradients are float32, and the kernel of many reads gradients in
    the parameters' type. It could update the masters, but nothing rounds many of them at once: that would be
    a launch for each again, and would read and write all of them once more.
    """

    def _apply_optimize(
        self,
        loss: Any,
        startup_program: Any,
        params_grads: Sequence[Pair],
        param_group_idx: int = 0,
    ) -> Any:
        together = [pair for pair in params_grads if _fits(*pair)]
        if together:
            self._update_together(together)
        alone = [pair for pair in params_grads if not _fits(*pair)]
        return super()._apply_optimize(loss, startup_program, alone, param_group_idx) if alone else []

    @paddle.no_grad()
    def _update_together(self, pairs: Sequence[Pair]) -> None:
        block = paddle.base.framework.default_main_program().global_block()
        self._create_global_learning_rate()
        self._create_accumulators(block, [parameter for parameter, _ in pairs])
        groups: dict[tuple[bool, float], list[Pair]] = {}
        for pair, power in zip(pairs, self._powers([parameter for parameter, _ in pairs]), strict=True):
            decays = self._apply_decay_param_fun is None or self._apply_decay_param_fun(pair[0].name)
            groups.setdefault((decays, power), []).append(pair)
        for (decays, _), group in groups.items():
            self._call(group, self._weight_decay if decays else 0.0)

    def _powers(self, parameters: Sequence[paddle.Tensor]) -> list[float]:
        """What parameters of one call must share: beta1 to the power of the steps taken. The CPU's kernel
        reads each parameter's own, the GPU's the first one's for all."""
        if parameters[0].place.is_cpu_place():
            return [0.0] * len(parameters)
        powers = [self._get_accumulator_master(self._beta1_pow_acc_str, one) for one in parameters]
        if moves_powers(paddle.get_device()):
            return paddle.concat(powers).tolist()
        return list(map(_power_on_host, powers))

    def _call(self, group: Sequence[Pair], weight_decay: float) -> None:
        parameters, gradients = [pair[0] for pair in group], [pair[1] for pair in group]
        moments1, moments2, powers1, powers2 = (
            [self._get_accumulator_master(name, parameter) for parameter in parameters]
            for name in (
                self._moment1_acc_str,
                self._moment2_acc_str,
                self._beta1_pow_acc_str,
                self._beta2_pow_acc_str,
            )
        )
        fused_adamw(
            parameters,
            gradients,
            self._create_param_lr(group[0]),
            (moments1, moments2, powers1, powers2),
            betas=(self._beta1, self._beta2),
            epsilon=self._epsilon,
            weight_decay=weight_decay,
        )


def fused_adamw(
    parameters: Sequence[paddle.Tensor],
    gradients: Sequence[paddle.Tensor],
    lr: paddle.Tensor,
    states: tuple[Sequence[paddle.Tensor], ...],
    *,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
) -> None:
    """One step of AdamW on float32 tensors, in place.

    Args:
        parameters, gradients: as many of each, pairwise of one shape.
        lr: learning rate, one element.
        states: first and second moments, and both betas to the power of the steps begun, one element each.
        betas, epsilon, weight_decay: of AdamW.
    """
    moments1, moments2, powers1, powers2 = states
    _C_ops.fused_adam_(
        list(parameters),
        list(gradients),
        lr,
        list(moments1),
        list(moments2),
        None,  # largest second moments, of AMSGrad
        list(powers1),
        list(powers2),
        None,  # master weights
        None,  # whether to skip the update
        *betas,
        epsilon,
        _CHUNK,
        weight_decay,
        True,  # decay as AdamW
        False,  # master weights
        False,  # powers shared by all parameters
        False,  # AMSGrad
    )


def _power_on_host(power: paddle.Tensor) -> float:
    return float(power.item())


def _fits(parameter: paddle.Tensor, gradient: paddle.Tensor) -> bool:
    return parameter.dtype == gradient.dtype == paddle.float32 and parameter.size <= _LARGEST
