"""Weight decay, learning-rate factor and optimizer group of each parameter. Does not import Paddle."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.optimizer import OptimizerConfig, ParamGroupConfig, is_block_matrix
from ppfleetx.nn.param_spec import ParamSpec


def decays(name: str, global_shape: Sequence[int]) -> bool:
    """Return whether weight decay applies to a parameter. It applies to matrices, including embeddings, but
    not to biases and norm gains (Megatron's rule). ``global_shape`` is the shape before the parameter is
    split between ranks."""
    return not (name.endswith(".bias") or len(global_shape) <= 1)


def takes_all(spec: ParamSpec) -> bool:
    return True


def is_hidden_matrix(spec: ParamSpec) -> bool:
    """Return whether a parameter is a weight matrix inside a transformer block. Matrices of routers and
    adapters are excluded."""
    return is_block_matrix(spec.name, spec.kind)


MUON_RULES: dict[str, Callable[[ParamSpec], bool]] = {"Muon": is_hidden_matrix, "AdamW": takes_all}
"""The update rules of ``Optimizer.name: Muon``, by name. Each comes with a function that returns whether the
rule accepts a parameter. A parameter belongs to the first rule that accepts it."""


def width_factor(spec: ParamSpec, width_multiplier: float) -> float:
    """Return the factor of a parameter's learning rate under muP (Yang et al., 2022, table 8)."""
    return 1 / width_multiplier if is_hidden_matrix(spec) or spec.kind == "router" else 1.0


def layer_factor(name: str, decay: float, num_layers: int) -> float:
    if decay == 1.0:
        return 1.0
    block = re.match(r"decoder\.layers\.(\d+)\.", name)
    if block:
        return decay ** (num_layers - int(block[1]))
    return decay ** (num_layers + 1) if name.startswith("embedding.") else 1.0


@dataclass(frozen=True)
class GroupRow:
    """A row in the table of parameter groups that ``--check`` prints. ``names`` are the parameters;
    ``settings`` lists the settings of the group that differ from their defaults."""

    name: str
    optimizer: str
    names: tuple[str, ...]
    num_elements: int
    settings: str = ""


def group_rows(
    cfg: OptimizerConfig, specs: Iterable[ParamSpec], origins: Mapping[str, str] = MappingProxyType({})
) -> list[GroupRow]:
    """Return the rows of the table of parameter groups that ``--check`` prints. The rows of
    ``Optimizer.groups`` come first, followed by those of all other parameters of the model.

    Args:
        origins: where each configuration key was set (for example, ``file:line``), for error messages.

    Raises:
        ConfigError: a group, or one of its patterns, matches no trainable parameter. Also raised if Muon has
            no matrix to update.
    """

    def wrong(rule: str, key: str, value: str) -> ConfigError:
        return ConfigError(rule, key=key, value=value, place=origins.get(key))

    members: list[list[ParamSpec]] = [[] for _ in range(len(cfg.groups) + 1)]
    trained = [spec for spec in specs if spec.trains]
    for spec in trained:
        number = next(
            (n for n, group in enumerate(cfg.groups) if group.takes(spec.name, spec.kind)), len(cfg.groups)
        )
        members[number].append(spec)
    rows = []
    for number, found in enumerate(members):
        own = cfg.groups[number] if number < len(cfg.groups) else ParamGroupConfig.model_construct()
        key = f"Optimizer.groups.{number}" if number < len(cfg.groups) else "others"
        if not found and number < len(cfg.groups):
            rest = " that is not already in an earlier group" if number else ""
            raise wrong(
                f"matches no trainable parameter{rest}", key, ", ".join(own.patterns or own.kinds or ())
            )
        for pattern in own.patterns:
            if not any(fnmatchcase(spec.name, pattern) for spec in trained):
                raise wrong("matches no trainable parameter", f"{key}.parameters", pattern)
        if own.optimizer == "Muon" and not any(map(is_hidden_matrix, found)):
            raise wrong(
                "matches no matrix of a block, and Muon updates nothing else", f"{key}.optimizer", "Muon"
            )
        rows += _rows(key, own, own.optimizer or cfg.name, found)
    if cfg.name == "Muon" and not any(row.optimizer == "Muon" for row in rows):
        rule = "finds no matrix of a block to update (adapters do not count); use AdamW"
        raise wrong(rule, "Optimizer.name", "Muon")
    return rows


def _rows(key: str, own: ParamGroupConfig, optimizer: str, found: list[ParamSpec]) -> list[GroupRow]:
    names = ("lr_factor", "weight_decay", "beta1", "beta2")
    fields = type(own).model_fields
    changed = {name: value for name in names if (value := getattr(own, name)) != fields[name].default}
    settings = ", ".join(f"{name} {value:g}" for name, value in changed.items())
    rules = MUON_RULES if optimizer == "Muon" else {optimizer: takes_all}
    parts: dict[str, list[ParamSpec]] = {name: [] for name in rules}
    for spec in found:
        parts[next(name for name, takes in rules.items() if takes(spec))].append(spec)
    return [
        GroupRow(
            key,
            name,
            tuple(spec.name for spec in specs),
            sum(math.prod(spec.shape) for spec in specs),
            settings,
        )
        for name, specs in parts.items()
        if specs
    ]
