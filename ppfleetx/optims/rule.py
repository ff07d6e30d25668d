"""Base classes of an optimizer's update rules, and declarations of the states that the rules keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import paddle
from paddle import Tensor, _C_ops

from ppfleetx.optims.param_groups import takes_all

if TYPE_CHECKING:
    from ppfleetx.config.sections.optimizer import OptimizerConfig
    from ppfleetx.nn.param_spec import ParamSpec


@dataclass(frozen=True)
class StateSpec:
    """A state tensor that a rule keeps for each parameter. Checkpoints store it under the parameter's name.

    Attributes:
        start: initial value of all elements.
        is_number: whether the state is a single number ``[1]`` in host memory; otherwise it has the
            parameter's shape.
    """

    name: str
    start: float = 0.0
    is_number: bool = False


@dataclass
class ParamView:
    """One parameter with its gradient and states, as the input of an update rule. The tensors are usually
    float32. All have the parameter's shape, except states that are a single number.

    Attributes:
        spec: the parameter's declaration; None if the optimizer is used without a model.
        value: the parameter, or its float32 master weight.
        gradient: the gradient, summed over all ranks and clipped. The rule can overwrite it.
        rounded: the 16-bit parameter whose master weight is ``value``; None without a master weight. Also
            None if the update runs in host memory, or on a matrix gathered from several ranks.
    """

    name: str
    spec: ParamSpec | None
    value: Tensor
    gradient: Tensor
    states: dict[str, Tensor]
    rounded: Tensor | None = None


class Rule(ABC):
    """Base class of update rules, such as AdamW. A rule changes parameters and states, given the gradients.

    Attributes:
        states: the states that the rule keeps for each parameter.
        needs_whole: whether the rule needs whole matrices. If True, one of the tensor-parallel ranks that
            share a matrix updates the whole matrix.
        rounds: whether :meth:`update` also writes :attr:`ParamView.rounded`.
        fused: whether fused kernels are in use.
        cfg: the section ``Optimizer``; ``cfg.options`` has only the options that the rule accepts.
    """

    states: tuple[StateSpec, ...] = ()
    needs_whole: ClassVar[bool] = False
    rounds: ClassVar[bool] = False
    fused: bool = False

    def __init__(self, cfg: OptimizerConfig) -> None:
        self.cfg = cfg

    @abstractmethod
    def update(self, group: Sequence[ParamView], *, lr: float, weight_decay: float) -> None:
        """Update values and states in place, with ``add_``, ``subtract_``, ``scale_`` and the like.

        Args:
            group: parameters that have gradients. One step can update the parameters of a :class:`Group` in
                several calls.
            weight_decay: weight decay of this step; 0 for biases and norm gains, unless
                :attr:`Group.weight_decay` is set.
        """

    def forget(self) -> None:  # noqa: B027  (most rules remember nothing)
        """Discard values that the rule has cached from the states, so that the caller can change the states.
        A rule that wraps another rule must forward the call."""


def as_tensor(lr: float, value: Tensor) -> Tensor:
    """Return the learning rate as a tensor ``[1]`` for the kernel that updates ``value``. The tensor must not
    be modified, because all updates of a step share it."""
    return _rate(lr, "float64" if value.dtype == paddle.float64 else "float32", paddle.get_device())


@lru_cache(maxsize=1)
def _rate(lr: float, dtype: str, device: str) -> Tensor:
    return paddle.full([1], lr, dtype)


@dataclass(frozen=True)
class Group:
    """Parameters that share an update rule.

    Attributes:
        takes: function that returns whether the group accepts a parameter. A parameter belongs to the first
            group that accepts it.
        lr_factor: factor of the step's learning rate.
        weight_decay: weight decay of all parameters of the group. None: the step's weight decay, and 0 for
            biases and norm gains.
    """

    name: str
    rule: Rule
    takes: Callable[[ParamSpec], bool] = takes_all
    lr_factor: float = 1.0
    weight_decay: float | None = None


class SGD(Rule):
    """Plain stochastic gradient descent, p -= lr * g, without weight decay or momentum."""

    def update(self, group: Sequence[ParamView], *, lr: float, weight_decay: float) -> None:
        rate = as_tensor(lr, group[0].value)
        for view in group:
            if view.rounded is None:
                _C_ops.sgd_(view.value, rate, view.gradient, None, False)
            else:
                view.value.subtract_(view.gradient * rate)


class UpdateRule(ABC):
    """The deprecated interface of an update rule, supported for one more version. Each call updates one
    parameter. ``states`` names the state tensors, which have the parameter's shape and start at 0."""

    states: ClassVar[tuple[str, ...]] = ()

    def __init__(self, cfg: OptimizerConfig) -> None:
        self.cfg = cfg

    @abstractmethod
    def update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        states: Mapping[str, Tensor],
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        """Update ``parameter`` and its ``states`` in place."""


class OneByOne(Rule):
    """A :class:`Rule` that wraps an :class:`UpdateRule` and calls it for each parameter."""

    def __init__(self, rule: UpdateRule) -> None:
        super().__init__(rule.cfg)
        self._rule, self.states = rule, tuple(StateSpec(name) for name in rule.states)

    def update(self, group: Sequence[ParamView], *, lr: float, weight_decay: float) -> None:
        for view in group:
            self._rule.update(view.value, view.gradient, view.states, lr=lr, weight_decay=weight_decay)
