"""From the `Optimizer` section of the configuration to an optimizer."""

from __future__ import annotations

from typing import Any

from ppfleetx.config.counts import counted
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.registries import OPTIMIZERS
from ppfleetx.config.sections.optimizer import OptimizerConfig
from ppfleetx.optims.adamw import NamedParams, Optimizer, UpdatePlace
from ppfleetx.optims.groups import decays
from ppfleetx.optims.rule import UpdateRule, optimizer_of_rule


def build_optimizer(
    cfg_optimizer: OptimizerConfig,
    named_params: NamedParams,
    *,
    multi_precision: bool = False,
    on_host: bool = False,
    fused: bool = False,
) -> Optimizer:
    """Optimizer of section `Optimizer` over (canonical name, parameter) pairs.

    Args:
        cfg_optimizer: the section.
        named_params: parameters; frozen ones (`stop_gradient`) are left out.
        multi_precision: keep float32 master weights of 16-bit parameters (GPU).
        on_host: keep all state in host memory and update there.
        fused: update many parameters in one kernel, where the optimizer has one.

    Raises:
        ConfigError: the optimizer is not known, or is not what it was registered as.
    """
    name = cfg_optimizer.name
    shapes = {name: _global_shape(param) for name, param in named_params}
    place = UpdatePlace(lambda name: decays(name, shapes[name]), multi_precision, on_host, fused)
    if not isinstance(OPTIMIZERS.load(name), type):
        return OPTIMIZERS.make(name, named_params, cfg_optimizer, place, gives=Optimizer)
    rule = OPTIMIZERS.make(name, cfg_optimizer, gives=UpdateRule)
    if len(rule.states) != OPTIMIZERS.traits(name).states:
        raise ConfigError(
            f"keeps {counted(len(rule.states), 'state')} for each parameter, and was registered with "
            f"OptimizerTraits(states={OPTIMIZERS.traits(name).states}), which is what memory is counted by",
            key="Optimizer.name",
            value=name,
        )
    return optimizer_of_rule(rule, named_params, cfg_optimizer, place)


def _global_shape(param: Any) -> list[int]:
    info = getattr(param, "info", None)
    return list(param.shape if info is None else info.global_shape)
