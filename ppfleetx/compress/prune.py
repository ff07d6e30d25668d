"""Structured pruning: remove attention groups, feed-forward units, experts and whole layers from a model.

An attention group is a key/value head with its query heads. A feed-forward unit is one hidden feature of an
MLP. Every layer loses the same number of groups; the same holds for units and for experts. Shared experts
are not pruned.

Shape letters: g attention groups, f feed-forward units, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy_tensors import LazyTensor, cast
from ppfleetx.compress import Criterion, Part
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.compress import num_to_remove
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.moe import MoEConfig, is_router_load
from ppfleetx.config.validate import section_of
from ppfleetx.models.gpt.spec import model_spec, parameter_shapes

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
"""Matches a parameter name in a layer. Regex group 1 is the layer number, group 2 the name in the layer."""
_LINEARS = ("attention.qkv", "attention.out_proj", "mlp.fc1", "mlp.fc2")


@dataclass(frozen=True)
class GroupsAndUnits:
    """An array for the attention groups of a layer, and an array for its feed-forward units. They contain
    scores (float64 ``[g]`` and ``[f]``), or the sorted indices of the groups and units to keep."""

    groups: np.ndarray
    units: np.ndarray


@dataclass(frozen=True)
class Parts:
    """How a weight or bias is divided into attention groups or feed-forward units (the parts).

    Attributes:
        of_groups: True if the parts are attention groups, False if they are feed-forward units.
        axis: the dimension that is divided into parts.
        width: the number of elements along ``axis`` in each part.
    """

    of_groups: bool
    axis: int
    width: int

    def indices(self, which: np.ndarray) -> np.ndarray:
        """Return the indices along ``axis`` of the elements in some groups or units.

        Args:
            which: the numbers of the groups or units.
        """
        return (which[:, np.newaxis] * self.width + np.arange(self.width)).reshape(-1)


def parts_of(own: str, shape: Sequence[int], model: ModelConfig) -> Parts | None:
    """Return how a parameter is divided into attention groups or feed-forward units. None if it is not
    divided, for example if it belongs to a norm.

    Args:
        own: the parameter's name in its layer, such as ``mlp.fc1.weight``.
    """
    linear, _, kind = own.rpartition(".")
    if linear in ("attention.qkv", "mlp.fc1"):
        axis = len(shape) - 1
    elif linear in ("attention.out_proj", "mlp.fc2") and kind == "weight":
        axis = 0
    else:
        return None
    of_groups = linear.startswith("attention")
    return Parts(of_groups, axis, shape[axis] // (model.kv_heads if of_groups else model.ffn_size))


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model after pruning.

    Attributes:
        num_groups: attention groups per layer.
        num_units: feed-forward units per layer.
        layers: indices of the remaining layers, in order.
    """

    num_groups: int
    num_units: int
    layers: tuple[int, ...]


def sizes_after(
    model: ModelConfig,
    ratio: float,
    *,
    part: Part = "both",
    multiple: int = 1,
    drop_layers: tuple[int, ...] = (),
) -> Sizes:
    """Compute the sizes of a model after pruning.

    Args:
        ratio: the fraction to remove from each layer.
        part: what to prune: attention groups, feed-forward units, or both.
        multiple: the numbers of remaining groups and units are rounded up to multiples of this number. They
            never exceed the numbers before pruning.
        drop_layers: indices of layers to remove as a whole.

    Raises ConfigError if the network cannot be pruned, an argument is out of range, no head, unit or layer
    would remain, or nothing would change.
    """
    check_network(model)
    check_ratio(ratio, multiple)
    absent = [layer for layer in drop_layers if not 0 <= layer < model.num_layers]
    if absent:
        raise ConfigError(
            f"the model has the layers 0 to {model.num_layers - 1}", key="--drop-layers", value=absent[0]
        )
    layers = tuple(layer for layer in range(model.num_layers) if layer not in drop_layers)
    if not layers:
        raise ConfigError("leaves no layer", key="--drop-layers", value=list(drop_layers))
    groups, units = (
        _left(total, ratio, multiple, what) if part in (own, "both") else total
        for total, own, what in (
            (model.kv_heads, "heads", "key/value head"),
            (model.ffn_size, "mlp", "feed-forward unit"),
        )
    )
    if (groups, units, len(layers)) == (model.kv_heads, model.ffn_size, model.num_layers):
        what = f"{model.kv_heads} key/value heads and {model.ffn_size} feed-forward units"
        raise _removes_none(what, ratio, multiple)
    return Sizes(groups, units, layers)


def check_ratio(ratio: float, multiple: int) -> None:
    """Raise ConfigError unless the fraction to remove (``ratio``) is in [0, 1), and ``multiple`` is at least
    1."""
    if not 0 <= ratio < 1:
        raise ConfigError("is the fraction to remove: at least 0, below 1", key="--ratio", value=ratio)
    if multiple < 1:
        raise ConfigError("must be at least 1", key="--multiple", value=multiple)


def _left(total: int, ratio: float, multiple: int, what: str) -> int:
    if ratio and total == 1:
        raise ConfigError(
            f"leaves no {what}: each layer has only one; prune the other part (--part)",
            key="--ratio",
            value=ratio,
        )
    return _rounded_up(total, ratio, multiple)


def _rounded_up(total: int, ratio: float, multiple: int) -> int:
    """Return how many of ``total`` groups, units or experts remain after the fraction ``ratio`` is removed.
    The result is rounded up to a multiple of ``multiple``, but never exceeds ``total``."""
    return min(-(-(total - num_to_remove(total, ratio)) // multiple) * multiple, total)


def _removes_none(what: str, ratio: float, multiple: int) -> ConfigError:
    condition = f", where what remains must be a multiple of {multiple}" if multiple > 1 else ""
    return ConfigError(f"removes none of {what}{condition}", key="--ratio", value=ratio)


def check_network(model: ModelConfig) -> None:
    """Raise ConfigError unless the network can be pruned. All layers must be the same, each must have exactly
    the matrices ``qkv``, ``out_proj``, ``fc1`` and ``fc2``, and ``ModelConfig.why_not_prunable`` must be
    None."""
    if model.why_not_prunable is not None:
        key, why = model.why_not_prunable
        raise ConfigError(why, key=f"Model.{key}")
    block, *others = model_spec(model).blocks
    specs = block.parameters()
    matrices = {name.removesuffix(".weight") for name, spec in specs.items() if len(spec.shape) > 1}
    if matrices != set(_LINEARS) or any(other != block for other in others):
        raise ConfigError(
            f"its layers differ, or have other matrices than {', '.join(_LINEARS)}, and cannot be pruned",
            key="Model.name",
            value=model.name,
        )


def pruned_model(model: ModelConfig, sizes: Sizes) -> ModelConfig:
    per_group = model.num_attention_heads // model.kv_heads
    values: dict[str, Any] = {
        "num_layers": len(sizes.layers),
        "num_attention_heads": sizes.num_groups * per_group,
        "num_query_groups": sizes.num_groups,
        "head_dim": model.head_size,
        "ffn_hidden_size": sizes.num_units,
    }
    if len(sizes.layers) < model.num_layers:
        values |= {"recompute_layers": None, "no_recompute_layers": None}  # these refer to old layer numbers
    return ModelConfig(**{**model.model_dump(), **values})


# -- importance


def magnitude_scores(
    tensors: Mapping[str, LazyTensor], model: ModelConfig, layer: int, criterion: Criterion
) -> GroupsAndUnits:
    """Score the attention groups and feed-forward units of a layer by the sum of magnitudes (``l1_norm``) or
    squares (``l2_norm``) of their weights."""

    def mass(name: str) -> np.ndarray:
        tensor = tensors[f"decoder.layers.{layer}.{name}.weight"]
        parts = parts_of(f"{name}.weight", tensor.shape, model)
        return mass_of_parts(tensor.read(), tensor.dtype, parts, criterion)

    return GroupsAndUnits(
        mass("attention.qkv") + mass("attention.out_proj"), mass("mlp.fc1") + mass("mlp.fc2")
    )


def mass_of_parts(values: np.ndarray, dtype: str, parts: Parts, criterion: Criterion) -> np.ndarray:
    """Sum the weights of each attention group or feed-forward unit of a matrix, in float64: their magnitudes
    (``l1_norm``), or their squares (``l2_norm``).

    Args:
        values: the matrix, or a slice that consists of whole groups or units. A bfloat16 matrix is passed as
            uint16 with the same bits.
        dtype: the element type of ``values``, named as in safetensors files.
        parts: how the matrix is divided into groups or units.
    """
    # Sums in float64 do not depend on the parallel plan that saved the checkpoint.
    mass = np.abs(cast(values, dtype, "F32").astype(np.float64))
    if criterion == "l2_norm":
        mass = mass**2
    return mass.sum(axis=1 - parts.axis).reshape(-1, parts.width).sum(axis=1)


def kept_of(scores: GroupsAndUnits, sizes: Sizes) -> GroupsAndUnits:
    """Return the sorted indices of the groups and units with the largest scores. ``sizes`` says how many to
    keep. Among equal scores, the lower index is kept."""
    return GroupsAndUnits(_largest(scores.groups, sizes.num_groups), _largest(scores.units, sizes.num_units))


def _largest(scores: np.ndarray, count: int) -> np.ndarray:
    return np.sort(np.argsort(-scores, kind="stable")[:count])


# -- the smaller model


def pruned_tensors(
    tensors: Mapping[str, LazyTensor], model: ModelConfig, sizes: Sizes, kept: Mapping[int, GroupsAndUnits]
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield (name, tensor) for each parameter of the pruned model, with layers renumbered. Tensors are read
    lazily.

    Args:
        tensors: the tensors of the original model.
        model: the network before pruning.
        sizes: the sizes after pruning.
        kept: number of a layer in the original model -> indices of the groups and units to keep.
    """
    numbers = {old: new for new, old in enumerate(sizes.layers)}
    for name, tensor in tensors.items():
        found = LAYER.fullmatch(name)
        if found is None:
            yield name, tensor
            continue
        layer, own = int(found[1]), found[2]
        if layer in numbers:
            yield f"decoder.layers.{numbers[layer]}.{own}", _cut(tensor, own, model, kept[layer])


def _cut(tensor: LazyTensor, own: str, model: ModelConfig, kept: GroupsAndUnits) -> LazyTensor:
    parts = parts_of(own, tensor.shape, model)
    if parts is None:
        return tensor
    which = kept.groups if parts.of_groups else kept.units
    if len(which) * parts.width == tensor.shape[parts.axis]:
        return tensor
    return _taken(tensor, parts.indices(which), parts.axis)


def _taken(tensor: LazyTensor, which: np.ndarray, axis: int) -> LazyTensor:
    shape = tuple(len(which) if dim == axis else size for dim, size in enumerate(tensor.shape))
    return LazyTensor(tensor.dtype, shape, lambda: np.take(tensor.read(), which, axis=axis))


# -- experts


def experts_left(model: ModelConfig, ratio: float, *, multiple: int = 1) -> int:
    """Return how many experts remain in each layer after removing the fraction ``ratio``. The result is
    rounded up to a multiple of ``multiple``. Raises ConfigError if no expert can be removed, or if too few
    would remain."""
    check_ratio(ratio, multiple)
    moe = model.moe
    if moe is None:
        raise ConfigError("the model has no mixtures of experts (Model.moe)", key="--part", value="experts")
    total, left = moe.num_experts, _rounded_up(moe.num_experts, ratio, multiple)
    if left == total:
        raise _removes_none(f"{total} experts", ratio, multiple)
    try:
        section_of(MoEConfig, {**moe.model_dump(), "num_experts": left})
    except ConfigError as error:
        raise ConfigError(
            f"leaves {left} of {total} experts: {error.rule}", key="--ratio", value=ratio
        ) from None
    return left


def pruned_mixtures(model: ModelConfig, num_experts: int) -> ModelConfig:
    values = model.model_dump()
    return ModelConfig(**{**values, "moe": {**values["moe"], "num_experts": num_experts}})


def router_scores(
    tensors: Mapping[str, LazyTensor], model: ModelConfig, criterion: Criterion
) -> dict[int, np.ndarray]:
    """Score experts by the sum of magnitudes (``l1_norm``) or squares (``l2_norm``) of their router
    weights. Returns layer number -> scores ``[E]``."""
    scores = {}
    for layer in model.moe.mixture_layers(model.num_layers):
        weight = tensors[f"decoder.layers.{layer}.mlp.router.weight"]
        values = np.abs(cast(weight.read(), weight.dtype, "F32").astype(np.float64))
        scores[layer] = (values**2 if criterion == "l2_norm" else values).sum(axis=0)
    return scores


def kept_experts(scores: np.ndarray, num_experts: int, num_groups: int | None) -> np.ndarray:
    """Return the sorted indices of the experts to keep: those with the largest scores. Among equal scores,
    the lower index is kept.

    Args:
        scores: the scores ``[E]``.
        num_experts: the number of experts to keep.
        num_groups: the number of routing groups, if any. Each group keeps the same number of experts.
    """
    grouped = scores.reshape(num_groups or 1, -1)
    best = np.argsort(-grouped, axis=1, kind="stable")[:, : num_experts // len(grouped)]
    return np.sort((best + np.arange(len(grouped))[:, None] * grouped.shape[1]).reshape(-1))


def without_experts(
    tensors: Mapping[str, LazyTensor], model: ModelConfig, small: ModelConfig, kept: Mapping[int, np.ndarray]
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield (name, tensor) for each parameter of a model after experts are removed. Tensors are read
    lazily. The measured loads of the experts are replaced by equal loads.

    Args:
        tensors: the tensors of the original model.
        model, small: the network before and after removal.
        kept: layer number -> indices of the experts to keep.
    """
    before, after = parameter_shapes(model), parameter_shapes(small)
    for name, tensor in tensors.items():
        if name not in after or before[name] == after[name]:
            yield name, tensor
        elif is_router_load(name):  # each expert's fraction of a step's tokens; restart from equal loads
            share = np.full(after[name], 1 / small.moe.num_experts, np.float32)
            yield name, LazyTensor("F32", after[name], lambda share=share: share)
        else:
            axis = next(dim for dim, size in enumerate(before[name]) if size != after[name][dim])
            yield name, _taken(tensor, kept[int(LAYER.fullmatch(name)[1])], axis)
