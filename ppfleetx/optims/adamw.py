"""AdamW: one kernel call per parameter, or fused calls for many float32 parameters of a group."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import _C_ops

from ppfleetx.config.sections.optimizer import OptimizerConfig
from ppfleetx.distributed.device import moves_powers
from ppfleetx.optims.rule import ParamView, Rule, StateSpec, as_tensor

_CHUNK = 1 << 16
"""The number of elements that one thread block processes."""
_LARGEST = (1 << 31) - 1
"""The largest number of elements of a tensor that the fused kernel accepts. It counts them in 32 bits."""
STATES = ("moment1", "moment2", "beta1_pow", "beta2_pow")
Powers = tuple[float, float]


class AdamW(Rule):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019): p -= lr * decay * p, then Adam's step."""

    rounds = True

    def __init__(self, cfg: OptimizerConfig) -> None:
        super().__init__(cfg)
        powers = zip(STATES[2:], (cfg.beta1, cfg.beta2), strict=True)
        self.states = (
            StateSpec("moment1"),
            StateSpec("moment2"),
            *(StateSpec(name, beta, is_number=True) for name, beta in powers),
        )
        self._powers: dict[str, Powers] = {}

    def forget(self) -> None:
        self._powers.clear()

    def update(self, group: Sequence[ParamView], *, lr: float, weight_decay: float) -> None:
        rate, betas = as_tensor(lr, group[0].value), (self.cfg.beta1, self.cfg.beta2)
        options = {"betas": betas, "epsilon": self.cfg.epsilon, "weight_decay": weight_decay}
        # On a GPU, one call per parameter would spend most of its time on the kernel launch.
        fused = [view for view in group if self.fused and _fits(view)]
        self._learn_powers(fused)
        # The fused GPU kernel reads the powers beta^t of the first parameter only, and uses them for all
        # parameters of a call.
        together: dict[Powers, list[ParamView]] = {}
        for view in fused:
            together.setdefault(self._powers[view.name], []).append(view)
        for power, views in together.items():
            values, gradients = [view.value for view in views], [view.gradient for view in views]
            states = tuple([view.states[name] for view in views] for name in STATES)
            fused_adamw(values, gradients, rate, states, **options)
            after = (power[0] * betas[0], power[1] * betas[1])
            self._powers |= dict.fromkeys((view.name for view in views), after)
        names = {view.name for view in fused}
        for view in group:
            if view.name not in names:
                adamw(view, rate, **options)

    def _learn_powers(self, views: Sequence[ParamView]) -> None:
        """Cache the powers (beta1^t, beta2^t) of the parameters that are not in the cache yet."""
        new = [view for view in views if view.name not in self._powers]
        self._powers |= zip((view.name for view in new), _powers(new), strict=True)


def adamw(
    view: ParamView, lr: paddle.Tensor, *, betas: tuple[float, float], epsilon: float, weight_decay: float
) -> None:
    has_master = view.rounded is not None
    moment1, moment2, power1, power2 = (view.states[name] for name in STATES)
    _C_ops.adamw_(
        view.rounded if has_master else view.value,
        view.gradient,
        lr,
        moment1,
        moment2,
        None,  # AMSGrad's largest second moment
        power1,
        power2,
        view.value if has_master else None,
        None,  # whether to skip the update
        *betas,
        epsilon,
        1.0,  # factor of the learning rate
        weight_decay,
        weight_decay != 0.0,
        False,  # lazy mode
        1000,  # number of sparse gradient rows from which threads are used
        has_master,
        False,  # powers shared by all parameters
        False,  # AMSGrad
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
    """Apply one step of AdamW to float32 tensors in place. The learning rate ``lr`` has shape ``[1]``.

    ``states`` has four sequences with one tensor per parameter: first moments, second moments, powers of
    beta1, and powers of beta2. Each power has shape ``[1]``. Its initial value is the beta itself.
    """
    moments1, moments2, powers1, powers2 = states
    _C_ops.fused_adam_(
        list(parameters),
        list(gradients),
        lr,
        list(moments1),
        list(moments2),
        None,  # AMSGrad's largest second moments
        list(powers1),
        list(powers2),
        None,  # master weights
        None,  # whether to skip the update
        *betas,
        epsilon,
        _CHUNK,
        weight_decay,
        True,  # decay as in AdamW
        False,  # master weights
        False,  # powers shared by all parameters
        False,  # AMSGrad
    )


def _powers(views: list[ParamView]) -> list[Powers]:
    """Return a pair for each parameter. Parameters with equal pairs are updated in one fused call.

    The pair is (beta1^t, beta2^t), where t is the number of the parameter's next update. On a CPU, it is
    (0, 0) for all parameters, because one call of the CPU kernel can update parameters with different powers.
    """
    if not views or views[0].value.place.is_cpu_place():
        return [(0.0, 0.0)] * len(views)
    powers = [view.states[name] for name in STATES[2:] for view in views]
    if moves_powers(paddle.get_device()):
        numbers = paddle.concat(powers).tolist()
    else:
        numbers = [float(power.item()) for power in powers]
    return list(zip(numbers[: len(views)], numbers[len(views) :], strict=True))


def _fits(view: ParamView) -> bool:
    # The fused kernel does not write the rounded 16-bit parameter.
    same = view.value.dtype == view.gradient.dtype == paddle.float32
    return same and view.rounded is None and view.value.size <= _LARGEST
