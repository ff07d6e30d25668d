"""Build the optimizer from the configuration section ``Optimizer``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.message_text import counted
from ppfleetx.config.registries import OPTIMIZERS
from ppfleetx.config.sections.optimizer import OptimizerConfig, ParamGroupConfig
from ppfleetx.nn.param_spec import ParamSpec
from ppfleetx.optims.optimizer import NamedParams, Optimizer, UpdatePlace
from ppfleetx.optims.param_groups import decays, layer_factor, width_factor
from ppfleetx.optims.rule import Group, OneByOne, Rule, UpdateRule
from ppfleetx.utils.log import get_logger


def build_optimizer(
    cfg_optimizer: OptimizerConfig,
    named_params: NamedParams,
    place: UpdatePlace | None = None,
    num_layers: int = 0,
    width_multiplier: float = 1.0,
) -> Optimizer:
    """Build the optimizer that section ``Optimizer`` configures.

    Args:
        named_params: (canonical name, parameter) pairs. Frozen parameters (``stop_gradient``) are ignored.
        num_layers: number of blocks of the whole model, for layer-wise learning-rate decay.
        width_multiplier: model width divided by ``Model.mup_base_width``, the width of the base model.

    Raises:
        ConfigError: the optimizer is not registered, or its number of states is not the registered number.
            Also raised for an optimizer that needs whole matrices, if tensor parallelism slices them and they
            are updated in host memory.
    """
    place = place or UpdatePlace()
    groups = optimizer_groups(cfg_optimizer)
    _check_place(groups, place)
    shapes = {name: _global_shape(param) for name, param in named_params}
    of_width = {
        name: width_factor(param.spec, width_multiplier)
        for name, param in named_params
        if width_multiplier != 1.0
    }
    return Optimizer(
        groups,
        named_params,
        lambda name: decays(name, shapes[name]),
        cfg_optimizer.weight_decay,
        place,
        lambda name: layer_factor(name, cfg_optimizer.layer_decay, num_layers) * of_width.get(name, 1.0),
    )


def optimizer_groups(cfg: OptimizerConfig) -> list[Group]:
    """Return the parameter groups that section ``Optimizer`` defines: first those of ``Optimizer.groups``,
    then those of the optimizer ``Optimizer.name``, which take all other parameters."""
    groups = []
    for number, own in enumerate(cfg.groups):
        given = {key: getattr(own, key) for key in ("beta1", "beta2") if getattr(own, key) is not None}
        changed = cfg.model_copy(update={**given, "name": own.optimizer or cfg.name})
        for group in _registered_groups(changed):
            name = f"groups.{number} {group.name}"
            takes = partial(_takes_both, own, group)
            groups.append(Group(name, group.rule, takes, own.lr_factor, own.weight_decay))
    return [*groups, *_registered_groups(cfg)]


def _takes_both(own: ParamGroupConfig, group: Group, spec: ParamSpec) -> bool:
    return own.takes(spec.name, spec.kind) and group.takes(spec)


def _registered_groups(cfg: OptimizerConfig) -> Sequence[Group]:
    """Return the parameter groups of the optimizer registered as ``cfg.name``. If a rule class is registered,
    one group takes all parameters. If a function is registered, it returns the groups."""
    part = OPTIMIZERS.load(cfg.name)
    own = OPTIMIZERS.traits(cfg.name).options
    cfg = cfg.model_copy(update={"options": {key: cfg.options[key] for key in own if key in cfg.options}})
    if not isinstance(part, type):
        groups = OPTIMIZERS.make(cfg.name, cfg, gives=list)
    elif issubclass(part, UpdateRule):
        _warn_of_update_rule(cfg.name)
        groups = [Group("all", OneByOne(OPTIMIZERS.make(cfg.name, cfg)))]
    else:
        groups = [Group("all", OPTIMIZERS.make(cfg.name, cfg, gives=Rule))]
    _check_states(groups, cfg.name)
    return groups


@cache
def _warn_of_update_rule(name: str) -> None:
    get_logger().warning(
        f"Optimizer.name = {name!r} is an UpdateRule, which the next version rejects: make it a Rule "
        "(docs/extending.md, An optimizer)"
    )


def _check_states(groups: Sequence[Group], name: str) -> None:
    if not groups:
        raise ConfigError("returns no group of parameters", key="Optimizer.name", value=name)
    most = max(sum(not state.is_number for state in group.rule.states) for group in groups)
    if most != OPTIMIZERS.traits(name).states:
        raise ConfigError(
            f"keeps {counted(most, 'state')} for each parameter, and was registered with "
            f"OptimizerTraits(states={OPTIMIZERS.traits(name).states}), from which memory is computed",
            key="Optimizer.name",
            value=name,
        )


def _check_place(groups: Sequence[Group], place: UpdatePlace) -> None:
    for group in groups:
        rule, name = group.rule, type(group.rule).__name__
        if not rule.needs_whole:
            continue
        if rule.rounds or any(state.is_number for state in rule.states):
            raise TypeError(
                f"{name} needs whole matrices: it must not round, and its states have their shape"
            )
        if place.on_host and any(place.group_of(axis) is not None for axis in ("mp", "emp")):
            raise ConfigError(
                "needs whole matrices, which tensor parallelism slices; they cannot be gathered in host "
                "memory. Set Distributed.sharding.sharding_offload to False",
                key="Optimizer",
                value=name,
            )


def _global_shape(param: Any) -> list[int]:
    info = getattr(param, "info", None)
    return list(param.shape if info is None else info.global_shape)
