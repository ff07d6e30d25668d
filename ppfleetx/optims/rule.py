"""The optimizer contract: update rules and the states they keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import paddle
from paddle import Tensor, _C_ops

from ppfleetx.optims.groups import takes_all

if TYPE_CHECKING:
    from ppfleetx.config.sections.optimizer import OptimizerConfig
    from ppfleetx.nn.param_spec import ParamSpec


@dataclass(frozen=True)
class StateSpec:
    """A tensor that a rule keeps for each parameter. Checkpoints store it under the parameter's name.

    Attributes:
        name: of the state.
        start: what it is filled with before the first step.
        is_number: it is one number, ``[1]``, in host memory; False: it has the parameter's shape.
    """

    name: str
    start: float = 0.0
    is_number: bool = False


@dataclass
class ParamView:
    """A parameter as a rule sees it: float32 tensors of one shape (a state may be a single number).

    Attributes:
        name: canonical name.
        spec: its declaration; None where an optimizer is tried without a model.
        value: the parameter, or its master weight.
        gradient: summed over the job and clipped. It may be overwritten.
        states: by name.
        rounded: the 16-bit parameter of which ``value`` is the master weight; None: there is none, or it is
            not in the same memory.
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
        states: what it keeps for each parameter.
        needs_whole: a rule that is not elementwise (a norm over a matrix) gets whole matrices, where tensor
            parallelism would give it slices. One rank of those that share a matrix updates it.
        rounds: :meth:`update` also writes :attr:`ParamView.rounded`.
        fused: whether the run takes fused kernels.

    Args:
        cfg: section ``Optimizer``; ``cfg.options`` holds the options it was registered with.
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
            group: parameters with gradients, or some of them; the others come in other calls of this step.
            lr: this step's learning rate.
            weight_decay: this step's; 0 for a group of biases and gains, which are not decayed.
        """

    def forget(self) -> None:  # noqa: B027  (most rules remember nothing)
        """Drop what the rule remembers of the states: somebody has asked for them and may change them. A rule
        that contains another calls that one's."""


def as_tensor(lr: float, value: Tensor) -> Tensor:
    """The learning rate as kernels that update ``value`` take it. All updates of a step share the tensor: do
    not change it."""
    return _rate(lr, "float64" if value.dtype == paddle.float64 else "float32", paddle.get_device())


@lru_cache(maxsize=1)
def _rate(lr: float, dtype: str, device: str) -> Tensor:
    """The learning rate as a tensor, created once a step."""
    return paddle.full([1], lr, dtype)


@dataclass(frozen=True)
class Group:
    """Parameters that share an update rule.

    Attributes:
        name: of the group.
        rule: how they move.
        takes: whether a parameter belongs to it; the first group of an optimizer that takes one has it.
        lr_factor: of the step's learning rate.
        weight_decay: of all its parameters in every step; None: the step's, and none of biases and gains.
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
    """The former rule interface, for one more version: it sees one tensor at a time.

    Attributes:
        states: names of the tensors of the parameter's shape that it keeps; they start at 0.
    """

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
