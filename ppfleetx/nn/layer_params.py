"""The parameters of each kind of layer, declared: layers are made by this, and the planner counts by it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ppfleetx.nn.init import Constant, Init, Normal
from ppfleetx.nn.param_spec import REPLICATE, ParamSpec, Part, Shard, dense

Specs = dict[str, ParamSpec]
"""By name within the layer."""


def qkv_parts(queries_per_group: int, head_dim: int) -> tuple[Part, ...]:
    """Columns ``[key/value head][query ... query, key, value][head_dim]``."""
    widths = {"q": queries_per_group * head_dim, "k": head_dim, "v": head_dim}
    period, parts, end = sum(widths.values()), [], 0
    for name, width in widths.items():
        parts.append(Part(name, 1, period, end, width))
        end += width
    return tuple(parts)


GATE_AND_UP = (Part("gate", 1, 2, 0, 1), Part("up", 1, 2, 1, 1))
"""Columns ``[unit][gate, up]``."""


def column_linear(
    in_features: int,
    out_features: int,
    *,
    bias: bool,
    init: Init,
    kind: str = "matrix",
    parts: tuple[Part, ...] = (),
) -> Specs:
    """A linear whose output features are sliced."""
    specs = {"weight": dense((in_features, out_features), init, kind, mp=Shard(1), parts=parts)}
    if bias:
        of_bias = tuple(replace(part, dim=0) for part in parts)
        specs["bias"] = dense((out_features,), Constant(0.0), "bias", mp=Shard(0), parts=of_bias)
    return specs


def row_linear(
    in_features: int, out_features: int, *, bias: bool, init: Init, sequence_parallel: bool
) -> Specs:
    """A linear whose input features are sliced; its bias is added after the sum over the ranks."""
    specs = {"weight": dense((in_features, out_features), init, "matrix", mp=Shard(0))}
    if bias:
        specs["bias"] = dense((out_features,), Constant(0.0), "bias", partial=sequence_parallel)
    return specs


def whole_linear(
    in_features: int, out_features: int, *, bias: bool, init: Init, partial: bool = False
) -> Specs:
    """A linear that every rank has whole; ``partial``: ranks see other positions."""
    specs = {"weight": dense((in_features, out_features), init, "matrix", partial=partial)}
    if bias:
        specs["bias"] = dense((out_features,), Constant(0.0), "bias", partial=partial)
    return specs


def word_table(rows: int, width: int, *, init: Init) -> Specs:
    """An embedding whose rows are sliced."""
    return {"weight": dense((rows, width), init, "word_embedding", mp=Shard(0))}


def position_table(rows: int, width: int, *, init: Init) -> Specs:
    """An embedding that every rank has whole, for all positions."""
    return {"weight": dense((rows, width), init, "position_embedding")}


def norm(names: Iterable[str], size: int, *, partial: bool, gain: float = 1.0) -> Specs:
    """A norm with the parameters ``names``; ``partial``: ranks see other positions, or other heads."""
    values = {"weight": (Constant(gain), "norm"), "bias": (Constant(0.0), "bias")}
    return {name: dense((size,), *values[name], partial=partial) for name in names}


def adapter(matrix: ParamSpec, rank: int, *, sequence_parallel: bool) -> Specs:
    """A low-rank adapter of ``matrix [in, out]``, sliced as the matrix is: A where its input features are
    sliced, B where its output features are. A starts as N(0, 1 / in), so that x A is of the size of x."""
    width_in, width_out = matrix.shape
    cut = matrix.lies("mp")
    a, b = (cut if cut == Shard(dim) else REPLICATE for dim in (0, 1))
    partial = matrix.sums("mp") if cut == REPLICATE else sequence_parallel
    init = Normal(1.0 / math.sqrt(width_in))
    return {
        "a": dense((width_in, rank), init, "lora", mp=a, partial=partial and a == REPLICATE),
        "b": dense((rank, width_out), Constant(0.0), "lora", mp=b, partial=partial and b == REPLICATE),
    }


def quantizer(matrix: ParamSpec, names: Iterable[str], *, sequence_parallel: bool) -> Specs:
    """The numbers of a fake quantiser of ``matrix``. Each rank learns the share of the weight's bound from
    its part of the weight, and the share of the input's bound from its features or positions."""
    cut = matrix.lies("mp")
    partial = {"input_scale": False, "weight_clip": cut != REPLICATE or matrix.sums("mp")}
    partial["input_clip"] = matrix.sums("mp") if cut == REPLICATE else sequence_parallel or cut == Shard(0)
    start = {"input_scale": 0.0}
    return {
        name: dense((1,), Constant(start.get(name, 1.0)), "quant", partial=partial[name]) for name in names
    }


def codes(matrix: ParamSpec, per_row: int) -> ParamSpec:
    """The stored integers of a frozen ``matrix``, of which ``per_row`` input features share a row."""
    return replace(matrix, shape=(matrix.shape[0] // per_row, matrix.shape[1]))


def scales(matrix: ParamSpec, group_size: int | None) -> ParamSpec:
    """The scales of a frozen ``matrix``: one for each group of input features and output feature, or for each
    output feature (None), which is then the same on all ranks that share its input features."""
    if group_size is not None:
        return codes(matrix, group_size)
    cut = matrix.lies("mp")
    return replace(
        matrix, shape=(1, matrix.shape[1]), value={"mp": cut if cut == Shard(1) else REPLICATE}, parts=()
    )
