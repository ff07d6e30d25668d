"""Structured pruning: attention groups, feed-forward units and whole layers are taken out of a model.

What is left is an ordinary model with smaller sizes. The configuration has one size for all layers, so each
layer loses the same number of groups and units; which ones is decided in each layer by itself. A group is
a key/value head with its query heads. Scores are computed from whole tensors in float64: a checkpoint gives
the same model, bit for bit, under whatever plan it was saved.

Shape letters: h trunk, g groups, w columns of a group in the fused projection, v its width in the output
projection's input, f units, p columns of a unit (2 with a gate).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ppfleetx.checkpoint.foreign.lazy import LazyTensor, cast
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.models.gpt.shape import layer_parameter_shapes

Criterion = Literal["l1_norm", "l2_norm", "saliency"]
Part = Literal["heads", "mlp", "both"]
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LINEARS = ("attention.qkv", "attention.out_proj", "mlp.fc1", "mlp.fc2")


@dataclass(frozen=True)
class Scores:
    """How much each part of one layer matters.

    Attributes:
        groups: ``[g]`` float64.
        units: ``[f]`` float64.
    """

    groups: np.ndarray
    units: np.ndarray


@dataclass(frozen=True)
class Kept:
    """What stays of one layer: sorted indices."""

    groups: np.ndarray
    units: np.ndarray


@dataclass(frozen=True)
class Sizes:
    """What stays in every layer, and which layers do.

    Attributes:
        num_groups, num_units: of each layer.
        layers: indices of those that stay, in order.
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
    """What stays when ``ratio`` of the groups and units is taken out, rounded to fewer.

    Args:
        model: the network.
        ratio: from 0 to below 1.
        part: what is pruned.
        multiple: what stays is rounded up to a multiple of it (a tensor-parallel degree to come).
        drop_layers: layers to leave out.

    Raises:
        ConfigError: nothing, or too little, would be left, or nothing would change.
    """
    _check_network(model)
    if not 0 <= ratio < 1:
        raise ConfigError("is the share taken out: from 0 to below 1", key="--ratio", value=ratio)
    if multiple < 1:
        raise ConfigError("must be at least 1", key="--multiple", value=multiple)
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
        raise ConfigError(
            f"takes nothing out of {model.kv_heads} key/value heads and {model.ffn_size} feed-forward units"
            + (f", where what stays is a multiple of {multiple}" if multiple > 1 else ""),
            key="--ratio",
            value=ratio,
        )
    return Sizes(groups, units, layers)


def _left(total: int, ratio: float, multiple: int, what: str) -> int:
    taken = int(total * ratio + 1e-9)
    if ratio and total == 1:
        raise ConfigError(
            f"leaves no {what}: each layer has one only; prune the other part (--part)",
            key="--ratio",
            value=ratio,
        )
    left = -(-(total - taken) // multiple) * multiple
    return min(left, total)


def _check_network(model: ModelConfig) -> None:
    shapes = layer_parameter_shapes(model)
    matrices = {name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) > 1}
    if matrices != set(_LINEARS):
        raise ConfigError(
            f"its layers have other matrices than {', '.join(_LINEARS)}, and cannot be pruned",
            key="Model.name",
            value=model.name,
        )


def pruned_model(model: ModelConfig, sizes: Sizes) -> ModelConfig:
    """The ``Model`` section of what is left."""
    per_group = model.num_attention_heads // model.kv_heads
    values: dict[str, Any] = {
        "num_layers": len(sizes.layers),
        "num_attention_heads": sizes.num_groups * per_group,
        "num_query_groups": sizes.num_groups,
        "head_dim": model.head_size,
        "ffn_hidden_size": sizes.num_units,
    }
    if len(sizes.layers) < model.num_layers:
        values |= {"recompute_layers": None, "no_recompute_layers": None}  # they count layers
    return ModelConfig(**{**model.model_dump(), **values})


# -- which parts matter least


def magnitude_scores(
    tensors: Mapping[str, LazyTensor], model: ModelConfig, layer: int, criterion: Criterion
) -> Scores:
    """Sum of magnitudes or squares of the weights that write into a group or unit, and read from it."""
    power = 1 if criterion == "l1_norm" else 2

    def mass(name: str) -> np.ndarray:
        tensor = tensors[f"decoder.layers.{layer}.{name}.weight"]
        values = np.abs(cast(tensor.read(), tensor.dtype, "F32").astype(np.float64))
        return values**power

    groups, units = model.kv_heads, model.ffn_size
    into_groups = mass("attention.qkv").sum(axis=0).reshape(groups, -1).sum(axis=1)
    out_of_groups = mass("attention.out_proj").sum(axis=1).reshape(groups, -1).sum(axis=1)
    into_units = mass("mlp.fc1").sum(axis=0).reshape(units, -1).sum(axis=1)
    return Scores(into_groups + out_of_groups, into_units + mass("mlp.fc2").sum(axis=1))


def kept_of(scores: Scores, sizes: Sizes) -> Kept:
    """The parts with the largest scores; of equal ones the first."""
    return Kept(_largest(scores.groups, sizes.num_groups), _largest(scores.units, sizes.num_units))


def _largest(scores: np.ndarray, count: int) -> np.ndarray:
    return np.sort(np.argsort(-scores, kind="stable")[:count])


# -- the smaller model


def pruned_tensors(
    tensors: Mapping[str, LazyTensor], model: ModelConfig, sizes: Sizes, kept: Mapping[int, Kept]
) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors of what is left, each read when it is asked for; layers are numbered anew.

    Args:
        tensors: of the whole model.
        model: its ``Model`` section.
        sizes: what stays.
        kept: of each layer that stays.
    """
    numbers = {old: new for new, old in enumerate(sizes.layers)}
    for name, tensor in tensors.items():
        found = _LAYER.fullmatch(name)
        if found is None:
            yield name, tensor
            continue
        layer, own = int(found[1]), found[2]
        if layer in numbers:
            yield f"decoder.layers.{numbers[layer]}.{own}", _cut(tensor, own, model, kept[layer])


def _cut(tensor: LazyTensor, own: str, model: ModelConfig, kept: Kept) -> LazyTensor:
    """The part of a layer's tensor that belongs to what is kept."""
    linear, _, kind = own.rpartition(".")
    groups, units = (kept.groups, model.kv_heads), (kept.units, model.ffn_size)
    if linear in ("attention.qkv", "mlp.fc1"):
        return _taken(tensor, *(groups if linear == "attention.qkv" else units), axis=len(tensor.shape) - 1)
    if linear in ("attention.out_proj", "mlp.fc2") and kind == "weight":
        return _taken(tensor, *(groups if linear == "attention.out_proj" else units), axis=0)
    return tensor


def _taken(tensor: LazyTensor, kept: np.ndarray, parts: int, *, axis: int) -> LazyTensor:
    """Of ``parts`` equal parts along ``axis`` those that are kept."""
    if len(kept) == parts:
        return tensor
    width = tensor.shape[axis] // parts
    indices = (kept[:, np.newaxis] * width + np.arange(width)).reshape(-1)
    shape = tuple(len(indices) if dim == axis else size for dim, size in enumerate(tensor.shape))
    return LazyTensor(tensor.dtype, shape, lambda: np.take(tensor.read(), indices, axis=axis))
