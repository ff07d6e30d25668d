"""Which parameters train how, decided by their declarations: decay, rate, group. No Paddle."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.optimizer import OptimizerConfig, ParamGroupConfig, is_hidden
from ppfleetx.nn.param_spec import ParamSpec


def decays(name: str, global_shape: Sequence[int]) -> bool:
    """Whether weight decay applies to parameter `name`.

    Biases and one-dimensional parameters (norm gains) are not decayed; matrices are, word and
    position embeddings among them (Megatron's rule). The shape is the global one: a slice of a
    matrix never turns into a vector.
    """
    return not (name.endswith(".bias") or len(global_shape) <= 1)


def is_hidden_matrix(spec: ParamSpec) -> bool:
    """Whether Muon moves it: matrices of the blocks, not tables, heads, routers and adapters."""
    return is_hidden(spec.name, spec.kind)


def layer_factor(name: str, decay: float, num_layers: int) -> float:
    """Factor of a parameter's learning rate under ``Optimizer.layer_decay``."""
    if decay == 1.0:
        return 1.0
    block = re.match(r"decoder\.layers\.(\d+)\.", name)
    if block:
        return decay ** (num_layers - int(block[1]))
    return decay ** (num_layers + 1) if name.startswith("embedding.") else 1.0


@dataclass(frozen=True)
class GroupRow:
    """A line of the list that ``--check`` prints.

    Attributes:
        name: of the group.
        optimizer: that moves it.
        names: canonical names of its parameters.
        num_elements: all of them together.
        settings: what differs from the other parameters.
    """

    name: str
    optimizer: str
    names: tuple[str, ...]
    num_elements: int
    settings: str = ""


def group_rows(cfg: OptimizerConfig, specs: Iterable[ParamSpec]) -> list[GroupRow]:
    """The groups of the section's ``groups``, then the rest.

    Args:
        cfg: section ``Optimizer``.
        specs: all parameters of the model.

    Raises:
        ConfigError: a group takes no parameter, or none that its optimizer moves.
    """
    members: list[list[ParamSpec]] = [[] for _ in range(len(cfg.groups) + 1)]
    for spec in specs:
        if spec.trains:
            number = next(
                (n for n, group in enumerate(cfg.groups) if group.takes(spec.name, spec.kind)),
                len(cfg.groups),
            )
            members[number].append(spec)
    rows = []
    for number, found in enumerate(members):
        own = cfg.groups[number] if number < len(cfg.groups) else ParamGroupConfig.model_construct()
        key = f"Optimizer.groups[{number}]" if number < len(cfg.groups) else "others"
        if not found and number < len(cfg.groups):
            raise ConfigError(
                "matches no trainable parameter that is not already in an earlier group",
                key=key,
                value=", ".join(own.patterns or own.kinds or ()),
            )
        if own.optimizer == "Muon" and not any(map(is_hidden_matrix, found)):
            raise ConfigError(
                "matches no matrix of a block, and Muon moves nothing else",
                key=f"{key}.optimizer",
                value="Muon",
            )
        rows += _rows(key, own, own.optimizer or cfg.name, found)
    return rows


def _rows(key: str, own: ParamGroupConfig, optimizer: str, found: list[ParamSpec]) -> list[GroupRow]:
    changed = ("lr_factor", "weight_decay", "beta1", "beta2")
    settings = ", ".join(f"{name} {getattr(own, name):g}" for name in changed if name in own.model_fields_set)
    parts = {optimizer: found}
    if optimizer == "Muon":
        matrices = [spec for spec in found if is_hidden_matrix(spec)]
        parts = {"Muon": matrices, "AdamW": [spec for spec in found if not is_hidden_matrix(spec)]}
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
