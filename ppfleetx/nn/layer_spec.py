"""Declarations of the parts that layers are made of: linears, norms, tables. Plain data, without Paddle.

A declaration says which parameters a layer has and what it costs. The factory makes linears, norms and tables
from their declarations; the planner and ``--check`` count by them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from ppfleetx.config.registries import NORMS
from ppfleetx.nn.cost import Operation, Work, elementwise, matmul
from ppfleetx.nn.cost import Part as Place
from ppfleetx.nn.init import Constant, Init
from ppfleetx.nn.param_spec import REPLICATE, ParamSpec, Part, Shard, dense
from ppfleetx.nn.tape import Step

Specs = dict[str, ParamSpec]
"""Declared parameters by their names within a layer."""


class LayerSpec(Protocol):
    """Base class of declarations: parameters and cost of a layer.

    Those of whole layers also have ``operations``, of a forward pass on one rank, and ``tape``: what these
    write, and keep for the backward pass.
    """

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        """Its parameters by local name, with global shapes; gradients are those of a plan with or without
        sequence parallelism."""


def within(layer: str, specs: Specs) -> Specs:
    """Prefix the names of ``specs`` with the sub-layer ``layer``."""
    return {f"{layer}.{name}": spec for name, spec in specs.items()}


@dataclass(frozen=True)
class LinearSpec:
    """``x W + b`` with ``W [in_features, out_features]``.

    Attributes:
        in_features, out_features: of the whole matrix.
        cut: what tensor parallelism slices: the output features (``columns``; the output stays sliced), the
            input features (``rows``; the input arrives sliced, the output is whole), or nothing (``whole``).
        bias: whether there is one.
        init: initial values of the matrix.
        kind: of the matrix; see :class:`ParamSpec`.
        parts: the matrices that it is made of.
        of_trunk: of a whole linear: its input is the positions of the hidden states that are here.
    """

    in_features: int
    out_features: int
    cut: Literal["columns", "rows", "whole"]
    bias: bool
    init: Init
    kind: str = "matrix"
    parts: tuple[Part, ...] = ()
    of_trunk: bool = False

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        """``weight``, and ``bias`` if there is one; behind rows, a bias is added after the sum over ranks."""
        of_weight, of_bias = {"columns": (Shard(1), Shard(0)), "rows": (Shard(0), REPLICATE)}.get(
            self.cut, (REPLICATE, REPLICATE)
        )
        is_partial = sequence_parallel and (self.cut == "rows" or self.of_trunk)
        partial_weight = is_partial and self.cut == "whole"
        shape = (self.in_features, self.out_features)
        weight = dense(shape, self.init, self.kind, mp=of_weight, partial=partial_weight, parts=self.parts)
        if not self.bias:
            return {"weight": weight}
        parts = tuple(replace(part, dim=0) for part in self.parts)
        bias = dense(shape[1:], Constant(0.0), "bias", mp=of_bias, partial=is_partial, parts=parts)
        return {"weight": weight, "bias": bias}

    def _here(self, work: Work) -> tuple[float, float]:
        """The number of a linear's features that one rank holds."""
        rows, columns = (work.mp if self.cut == cut else 1 for cut in ("rows", "columns"))
        return self.in_features / rows, self.out_features / columns

    def operation(self, name: str, part: Place, work: Work) -> Operation:
        """The cost of the product."""
        return matmul(name, part, self._rows(work), *self._here(work))

    def _rows(self, work: Work) -> float:
        """The number of positions on one rank."""
        return work.tokens / (work.split if self.of_trunk else 1)

    def weight_bytes(self, work: Work) -> float:
        """Bytes of the weight's gradient on one rank."""
        return math.prod(self._here(work)) * work.gradient_bytes

    def tape(self, work: Work, writes: str, reads: str) -> list[Step]:
        """The steps of the product, its exchange between ranks, and its bias."""
        weights = self.weight_bytes(work)
        size = self._rows(work) * self._here(work)[1] * work.activation_bytes
        if self.cut == "rows" and work.split > 1:
            whole = Step(f"{writes} before the sum", size, (reads,), keeps=(reads,), weights=weights)
            part = size / work.split
            return [whole, Step(writes, part, (whole.writes,), scratch=part if self.bias else 0.0)]
        steps = []
        if self.cut == "columns" and work.split > 1:  # it gathers its input, and keeps that
            steps.append(Step(f"{writes}: input", work.bytes_of(self.in_features), (reads,)))
            reads = steps[0].writes
        if not (self.bias and work.on_cpu and work.mp == 1):
            return [*steps, Step(writes, size, (reads,), keeps=(reads,), weights=weights)]
        # Our CPU layer spreads the bias over the rows by another product.
        product = Step(f"{writes} without bias", size, (reads,), keeps=(reads,), weights=weights)
        return [*steps, product, Step(writes, size, (product.writes,), scratch=size, back=size, reuses=True)]


@dataclass(frozen=True)
class NormSpec:
    """A norm over the last dimension.

    Attributes:
        kind: a name of ``Model.normalization``.
        size: of that dimension.
        epsilon: added to the variance or mean square.
        gain: initial value of its weight.
        inside_heads: whether its input is sliced over heads.
        over_heads: whether its dimension is all heads together, which tensor parallelism slices.
        before_split: whether its input has all positions even where sequence parallelism splits them: it is
            the embedding's.
    """

    kind: str
    size: int
    epsilon: float
    gain: float = 1.0
    inside_heads: bool = False
    over_heads: bool = False
    before_split: bool = False

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        """Those of ``weight`` and ``bias`` that the norm was registered with; ranks see other positions, or
        other heads."""
        traits = NORMS.traits(self.kind)
        weight = self.gain - 1.0 if traits.zero_centered else self.gain
        values = {"weight": (Constant(weight), "norm"), "bias": (Constant(0.0), "bias")}
        sees_all = self.before_split or self.over_heads
        partial = self.inside_heads or (sequence_parallel and not sees_all)
        mp = Shard(0) if self.over_heads else REPLICATE
        return {
            name: dense((self.size,), *values[name], mp=mp, partial=partial) for name in traits.parameters
        }

    def operation(self, name: str, part: Place, work: Work) -> Operation:
        """The cost of normalising the hidden states."""
        moved = work.part_of(self.size)
        return elementwise(name, part, 2 * moved, 4 * moved)

    def tape(self, work: Work, writes: str, reads: str, size: float | None = None) -> list[Step]:
        """The steps of normalising the hidden states, or a tensor of ``size`` bytes."""
        u = work.part_of(self.size) if size is None else size
        is_rms, e = self.kind.startswith("RMSNorm"), work.activation_bytes
        if not is_rms or work.on_cpu or work.fused:
            scratch, back = u if is_rms else 0.0, 2 * u if work.on_cpu else 0.0
            return [Step(writes, u, (reads,), keeps=(reads,), scratch=scratch, back=back)]
        wide = u * 4 / e  # squares and products are of a float32 copy
        copy = Step(f"{writes} in float32", wide, (reads,), back=0.0)
        masked = u if e != 4 else 0.0
        out = Step(writes, u, (copy.writes,), (copy.writes,), extra=masked, scratch=wide, back=2 * wide)
        return [copy, out]


@dataclass(frozen=True)
class TableSpec:
    """An embedding ``[rows, width]``: of words, whose rows are sliced, or of positions, which is whole."""

    rows: int
    width: int
    init: Init
    of_words: bool = True

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        """``weight``. Whole positions are summed, whatever the plan."""
        kind, mp = ("word_embedding", Shard(0)) if self.of_words else ("position_embedding", REPLICATE)
        return {"weight": dense((self.rows, self.width), self.init, kind, mp=mp)}

    def weight_bytes(self, work: Work) -> float:
        """Bytes of the table's gradient on one rank."""
        rows = self.rows / work.mp if self.of_words else self.rows
        return rows * self.width * work.gradient_bytes
