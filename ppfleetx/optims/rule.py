"""Optimizers made of a rule for one tensor, and all that a plan needs beside the rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import paddle

from ppfleetx.config.sections.optimizer import OptimizerConfig
from ppfleetx.optims.adamw import NamedParams, Optimizer, UpdatePlace, trainable
from ppfleetx.optims.on_host import OnHost


class UpdateRule(ABC):
    """How one parameter moves. A subclass that is registered as an optimizer runs under every plan: states
    are sharded with their parameters, saved and loaded by canonical name, kept in host memory if asked for;
    16-bit parameters move by their float32 master weights.

    Attributes:
        states: names of the float32 tensors, of the parameter's shape, that it keeps for each parameter;
            they start at 0.

    Args:
        cfg: section ``Optimizer``; ``cfg.options`` holds the options it was registered with.
    """

    states: ClassVar[tuple[str, ...]] = ()

    def __init__(self, cfg: OptimizerConfig) -> None:
        self.cfg = cfg

    @abstractmethod
    def update(
        self,
        parameter: paddle.Tensor,
        gradient: paddle.Tensor,
        states: Mapping[str, paddle.Tensor],
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        """Change ``parameter`` and ``states`` in place (``add_``, ``subtract_``, ``scale_``, ...).

        Only this one tensor is seen, which may be a slice of a parameter: norms over it depend on the plan,
        elementwise rules do not.

        Args:
            parameter: float32; the parameter or its master weight.
            gradient: float32 of the same shape, summed over the job and clipped. It may be overwritten.
            states: by name.
            lr: this step's learning rate.
            weight_decay: this step's; 0 for biases and gains, which are not decayed.
        """


def optimizer_of_rule(
    rule: UpdateRule,
    named_params: NamedParams,
    cfg: OptimizerConfig,
    place: UpdatePlace,
) -> Optimizer:
    """An optimizer that moves each parameter by a rule.

    Args:
        rule: how each parameter moves.
        named_params: (canonical name, parameter) pairs; frozen ones are left out.
        cfg: section ``Optimizer``.
        place: what decays, and where the states are.
    """
    named_params = trainable(named_params)
    decay_by_paddle_name = {param.name: place.decayed(name) for name, param in named_params}
    inner = (_HostRuleOptimizer if place.on_host else _RuleOptimizer)(
        rule,
        [param for _, param in named_params],
        decay_by_paddle_name,
        cfg.weight_decay,
        place.multi_precision and not place.on_host,
    )
    return Optimizer(inner, named_params, {name: name for name in rule.states})


class _RuleOptimizer(paddle.optimizer.Optimizer):
    """Paddle's optimizer around a rule, so that fleet's wrappers take it like any other."""

    def __init__(
        self,
        rule: UpdateRule,
        parameters: Sequence[paddle.Tensor],
        decays: Mapping[str, bool],
        weight_decay: float,
        multi_precision: bool,
    ) -> None:
        super().__init__(learning_rate=0.0, parameters=list(parameters))
        self.type = "rule"
        self._rule, self._multi_precision = rule, multi_precision
        # Optimizer.step sets the decay of each step here, as it does for AdamW.
        self._apply_decay_param_fun, self._weight_decay = decays.__getitem__, weight_decay

    def _create_accumulators(self, block: Any, parameters: Sequence[paddle.Tensor]) -> None:
        for parameter in parameters:
            if parameter.name in self._already_create_accumulator:
                continue
            value = parameter
            if self._multi_precision and self._is_dtype_fp16_or_bf16(parameter.dtype):
                value = self._create_master_weight(parameter)
            for name in self._rule.states:
                self._add_accumulator(name, value, dtype=paddle.float32)
            self._already_create_accumulator.add(parameter.name)

    @paddle.no_grad()
    def _append_optimize_op(self, block: Any, param_and_grad: tuple[paddle.Tensor, paddle.Tensor]) -> None:
        parameter, gradient = param_and_grad
        master = self._master_weights.get(parameter.name)
        value = parameter if master is None else master
        self._rule.update(
            value,
            gradient.astype("float32"),
            {name: self._get_accumulator_master(name, parameter) for name in self._rule.states},
            lr=self.get_lr(),
            weight_decay=self._weight_decay if self._apply_decay_param_fun(parameter.name) else 0.0,
        )
        if master is not None:
            paddle.assign(master.astype(parameter.dtype), parameter)


class _HostRuleOptimizer(OnHost, _RuleOptimizer):
    """The same, on the CPU."""
