"""Optimizers that are addressed by canonical parameter names.

`Optimizer` holds one of Paddle's optimizers (`inner`) and speaks of its parameters and of its
state by canonical name only. Paddle's own names (`linear_3.w_0`) depend on creation order and hence
on the plan; they appear here in one look-up table because `apply_decay_param_fun` is called with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppfleetx.optims.gradients import drop_gradient, gradient_of

if TYPE_CHECKING:
    from paddle import Tensor
    from paddle.optimizer import Optimizer as PaddleOptimizer

    from ppfleetx.config.sections.optimizer import OptimizerConfig

# State name in our checkpoints -> accumulator name in Paddle's AdamW.
ADAMW_ACCUMULATORS = {
    "moment1": "moment1",
    "moment2": "moment2",
    "beta1_pow": "beta1_pow_acc",
    "beta2_pow": "beta2_pow_acc",
}
MASTER_WEIGHT = "master_weight"

NamedParams = Sequence[tuple[str, "Tensor"]]
StateKey = tuple[str, str]


@dataclass(frozen=True)
class UpdatePlace:
    """What an optimizer has to know beside its section.

    Attributes:
        decayed: whether weight decay applies to a parameter, by canonical name.
        multi_precision: keep float32 master weights of 16-bit parameters.
        on_host: keep all state in host memory and update there.
        fused: update many parameters in one kernel, where the optimizer has one.
    """

    decayed: Callable[[str], bool]
    multi_precision: bool = False
    on_host: bool = False
    fused: bool = False


class Optimizer:
    """One of Paddle's optimizers behind canonical names.

    Gradients are those of `optims/gradients.py`. Learning rate and weight decay come with each step; no
    scheduler lives inside.
    """

    def __init__(
        self, inner: PaddleOptimizer, named_params: NamedParams, accumulators: Mapping[str, str]
    ) -> None:
        self.inner = inner
        self.named_params = list(named_params)
        self._parameters = [param for _, param in self.named_params]
        self._accumulators = dict(accumulators)
        self._updated: Callable[[], None] = lambda: None

    def keep_only(self, owned: Callable[[Tensor], bool], updated: Callable[[], None]) -> None:
        """Update, and keep states of, the `owned` parameters only; call `updated` after each update."""
        self.named_params = [(name, param) for name, param in self.named_params if owned(param)]
        self._updated = updated

    def step(self, lr: float, weight_decay: float | None = None) -> None:
        """Update all parameters that have a gradient; `weight_decay` None keeps the last one."""
        if self.named_params:  # a pipeline rank may have none, which Paddle's optimizers do not expect
            self.inner.set_lr(lr)
            if weight_decay is not None and hasattr(self.inner, "_apply_decay_param_fun"):
                # AdamW reads _weight_decay at each parameter's update and has no setter for it.
                self.inner._weight_decay = float(weight_decay)
            self._step()
        self._updated()

    def clear_grad(self) -> None:
        """Drop all gradients, of parameters that another rank updates too."""
        for param in self._parameters:
            drop_gradient(param)

    def keep_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Take these float32 tensors, by canonical name, as the master weights of 16-bit parameters; they
        are where the states are.

        Without it Paddle makes them from the rounded parameters at the first step.
        """
        for name, param in self.named_params:
            if name in masters:
                masters[name].name = self.inner._gen_master_weight_var_name(param)
                self.inner._master_weights[param.name] = masters[name]

    def _step(self) -> None:
        """What `inner.step()` does, with gradients from wherever they are: AdamW's looks at `grad` only."""
        import paddle

        pairs = [(param, gradient_of(param)) for _, param in self.named_params]
        with paddle.no_grad():
            self.inner._apply_optimize(
                loss=None,
                startup_program=None,
                params_grads=[(param, grad) for param, grad in pairs if grad is not None],
            )

    def state(self) -> dict[StateKey, Tensor]:
        """State tensors, (canonical name, state name) -> tensor; created first if no step was taken."""
        self._create_state()
        state = {}
        for name, param in self.named_params:
            for ours, theirs in self._accumulators.items():
                state[name, ours] = self.inner._get_accumulator_master(theirs, param)
            master = self.inner._master_weights.get(param.name)
            if master is not None:
                state[name, MASTER_WEIGHT] = master
        return state

    def _create_state(self) -> None:
        import paddle

        if not self._accumulators:
            return
        block = paddle.base.framework.default_main_program().global_block()
        self.inner._create_accumulators(block, [param for _, param in self.named_params])


def adamw(
    named_params: NamedParams,
    *,
    decayed: Callable[[str], bool],
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.01,
    multi_precision: bool = False,
    on_host: bool = False,
    fused: bool = False,
) -> Optimizer:
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019): p -= lr * wd * p, then Adam's step.

    `decayed(canonical name)` says where decay applies. `multi_precision` keeps float32 master weights
    of 16-bit parameters (Paddle has that kernel on GPUs only). `on_host` keeps all state in host memory and
    updates on the CPU. `fused` updates float32 parameters in one kernel for many.
    """
    import paddle

    from ppfleetx.optims.fused_adamw import FusedAdamW
    from ppfleetx.optims.on_host import HostAdamW

    named_params = trainable(named_params)
    decay_by_paddle_name = {param.name: decayed(name) for name, param in named_params}
    kind = HostAdamW if on_host else FusedAdamW if fused else paddle.optimizer.AdamW
    inner = kind(
        learning_rate=0.0,
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
        parameters=[param for _, param in named_params],
        weight_decay=weight_decay,
        apply_decay_param_fun=decay_by_paddle_name.__getitem__,
        multi_precision=multi_precision and not on_host,
    )
    return Optimizer(inner, named_params, ADAMW_ACCUMULATORS)


def sgd(named_params: NamedParams, *, multi_precision: bool = False, on_host: bool = False) -> Optimizer:
    """Plain stochastic gradient descent, p -= lr * g, without decay or momentum: it has no state but the
    master weights of 16-bit parameters (`multi_precision`; `on_host` keeps those in host memory)."""
    import paddle

    from ppfleetx.optims.master_sgd import MasterSGD
    from ppfleetx.optims.on_host import HostSGD

    named_params = trainable(named_params)
    kind = HostSGD if on_host else MasterSGD if multi_precision else paddle.optimizer.SGD
    inner = kind(
        learning_rate=0.0,
        parameters=[param for _, param in named_params],
        multi_precision=multi_precision and not on_host,
    )
    return Optimizer(inner, named_params, {})


def build_adamw(named_params: NamedParams, cfg: OptimizerConfig, place: UpdatePlace) -> Optimizer:
    """AdamW of section ``Optimizer``."""
    return adamw(
        named_params,
        decayed=place.decayed,
        beta1=cfg.beta1,
        beta2=cfg.beta2,
        epsilon=cfg.epsilon,
        weight_decay=cfg.weight_decay,
        multi_precision=place.multi_precision,
        on_host=place.on_host,
        fused=place.fused,
    )


def build_sgd(named_params: NamedParams, cfg: OptimizerConfig, place: UpdatePlace) -> Optimizer:
    """Plain gradient descent of section ``Optimizer``."""
    return sgd(named_params, multi_precision=place.multi_precision, on_host=place.on_host)


def trainable(named_params: NamedParams) -> list[tuple[str, Tensor]]:
    """Parameters that train, each once (a tied one may be listed under one name from two places)."""
    unique = {id(param): (name, param) for name, param in reversed(list(named_params))}
    return [pair for pair in reversed(list(unique.values())) if not pair[1].stop_gradient]
