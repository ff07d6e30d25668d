"""The optimizer contract: update rules and the states they keep."""

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
    """A tensor that a rule keeps for each parameter. Checkpoints store it under the parameter's name.

    ``start`` is the value of its elements before the first step. A single number (``is_number``) is ``[1]``,
    in host memory; other states have the parameter's shape.
    """

    name: str
    start: float = 0.0
    is_number: bool = False


@dataclass
class ParamView:
    """A parameter as a rule sees it: float32 tensors of the same shape (a state may be a single number).

    Attributes:
        spec: its declaration; None if an optimizer is tried without a model.
        value: the parameter, or its master weight.
        gradient: the gradient, summed over the job and clipped. The rule may overwrite it.
        rounded: the 16-bit parameter whose master weight is ``value``; None if there is none, or if it is not
            in the same memory.
    """

    name: str
    spec: ParamSpec | None
    value: Tensor
    gradient: Tensor
    states: dict[str, Tensor]
    rounded: Tensor | None = None


class Rule(ABC):
    """An update rule.

    Attributes:
        states: the states that it keeps for each parameter.
        needs_whole: whether the rule needs whole matrices, because it is not elementwise (it uses a norm of
            the matrix). Under tensor parallelism, one of the ranks that share a matrix then updates it.
        rounds: whether :meth:`update` also writes :attr:`ParamView.rounded`.
        fused: whether the run uses fused kernels.
        cfg: the section ``Optimizer``; ``cfg.options`` holds the options that the rule was registered with.
    """

    states: tuple[StateSpec, ...] = ()
    needs_whole: ClassVar[bool] = False
    rounds: ClassVar[bool] = False
    fused: bool = False

    def __init__(self, cfg: OptimizerConfig) -> None:
        self.cfg = cfg

    @abstractmethod
    def update(self, group: Sequence[ParamView], *, lr: float, weight_decay: float) -> None:
        """Change values and states in place (``add_``, ``subtract_``, ``scale_``, ...).

        Args:
            group: parameters with gradients, or some of them; the others are passed in other calls of the
                same step.
            weight_decay: this step's weight decay; 0 for a group of biases and gains, which are not decayed.
        """

    def forget(self) -> None:  # noqa: B027  (most rules remember nothing)
        """Drop all values that the rule has cached from the states, because a caller has asked for the states
        and may change them. A rule that contains another rule calls its method, too.
        """


def as_tensor(lr: float, value: Tensor) -> Tensor:
    """The learning rate as a tensor for kernels that need one. Its type suits ``value``, the parameter to
    update. All updates of a step share the tensor, so do not change it."""
    return _rate(lr, "float64" if value.dtype == paddle.float64 else "float32", paddle.get_device())


@lru_cache(maxsize=1)
def _rate(lr: float, dtype: str, device: str) -> Tensor:
    return paddle.full([1], lr, dtype)


@dataclass(frozen=True)
class Group:
    """Parameters that share an update rule.

    Attributes:
        takes: a function that decides whether a parameter belongs to the group. The first group that takes a
            parameter has it.
        lr_factor: the factor of the step's learning rate.
        weight_decay: the weight decay of all its parameters in every step. None: the step's value, and 0 for
            biases and gains.
    """

    name: str
    rule: Rule
    takes: Callable[[ParamSpec], bool] = takes_all
    lr_factor: float = 1.0
    weight_decay: float | None = None


class SGD(Rule):
    """Plain stochastic gradient descent, p -= lr * g, without decay or momentum."""

    def update(self, group: Sequence[ParamView], *, lr: float, weight_decay: float) -> None:
        rate = as_tensor(lr, group[0].value)
        for view in group:
            if view.rounded is None:
                _C_ops.sgd_(view.value, rate, view.gradient, None, False)
            else:
                view.value.subtract_(view.gradient * rate)


class UpdateRule(ABC):
    """The former rule interface, supported for one more version. It sees one tensor at a time. ``states``
    names the tensors that it keeps. They have the parameter's shape and start at 0."""

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
        """Change ``parameter`` and ``states`` in place."""


class OneByOne(Rule):
    """A :class:`Rule` that calls an :class:`UpdateRule` for each parameter."""

    def __init__(self, rule: UpdateRule) -> None:
        super().__init__(rule.cfg)
        self._rule, self.states = rule, tuple(StateSpec(name) for name in rule.states)

    def update(self, group: Sequence[ParamView], *, lr: float, weight_decay: float) -> None:
        for view in group:
            self._rule.update(view.value, view.gradient, view.states, lr=lr, weight_decay=weight_decay)
