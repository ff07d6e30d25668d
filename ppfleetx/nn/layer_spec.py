"""Declarations of linear layers, norms and embeddings: parameters and cost. Does not import Paddle."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from ppfleetx.config.registries import NORMS
from ppfleetx.nn.activation_memory import Step
from ppfleetx.nn.cost import Operation, Work, elementwise, matmul
from ppfleetx.nn.cost import Part as Place
from ppfleetx.nn.init import Constant, Init
from ppfleetx.nn.param_spec import REPLICATE, ParamSpec, Part, Shard, dense

Specs = dict[str, ParamSpec]
"""Declared parameters, by name within a layer."""


class LayerSpec(Protocol):
    """Interface of a layer's declaration. Declarations of attention and MLP layers also have methods
    ``operations`` (:mod:`ppfleetx.nn.cost`) and ``tape`` (:mod:`ppfleetx.nn.activation_memory`)."""

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        """Return the declarations of the layer's parameters, by name within the layer. Shapes are global.
        With ``sequence_parallel``, a gradient that each rank computes from only some positions is declared as
        a partial sum."""


def within(layer: str, specs: Specs) -> Specs:
    """Return ``specs``, the parameters of the sub-layer ``layer``, with ``{layer}.`` before each name."""
    return {f"{layer}.{name}": spec for name, spec in specs.items()}


def parameters_within(
    layers: Iterable[tuple[str, LayerSpec | None]], *, sequence_parallel: bool = True
) -> Specs:
    """Return the parameters of several sub-layers. Each parameter's name begins with the name of its
    sub-layer. A sub-layer that is None has no parameters."""
    specs: Specs = {}
    for name, layer in layers:
        if layer is not None:
            specs |= within(name, layer.parameters(sequence_parallel=sequence_parallel))
    return specs


@dataclass(frozen=True)
class LinearSpec:
    """Declaration of a linear layer, ``x W + b`` with ``W [in_features, out_features]``.

    Attributes:
        in_features, out_features: sizes of the whole matrix.
        cut: the dimension that tensor parallelism slices: output features (``columns``), input features
            (``rows``) or none (``whole``).
        kind: kind of the matrix, see :class:`ParamSpec`.
        parts: the matrices that are fused into this one; empty if it is a single matrix.
        input_is_sequence_parallel: whether the input has only this rank's positions under sequence
            parallelism. Only set if ``cut`` is ``whole``.
    """

    in_features: int
    out_features: int
    cut: Literal["columns", "rows", "whole"]
    bias: bool
    init: Init
    kind: str = "matrix"
    parts: tuple[Part, ...] = ()
    input_is_sequence_parallel: bool = False

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        """Declare ``weight`` and, if the layer has one, ``bias``."""
        of_weight, of_bias = {"columns": (Shard(1), Shard(0)), "rows": (Shard(0), REPLICATE)}.get(
            self.cut, (REPLICATE, REPLICATE)
        )
        # A row-parallel layer adds the bias after the reduce-scatter, to this rank's positions only.
        is_partial = sequence_parallel and (self.cut == "rows" or self.input_is_sequence_parallel)
        partial_weight = is_partial and self.cut == "whole"
        shape = (self.in_features, self.out_features)
        weight = dense(shape, self.init, self.kind, mp=of_weight, partial=partial_weight, parts=self.parts)
        if not self.bias:
            return {"weight": weight}
        parts = tuple(replace(part, dim=0) for part in self.parts)
        bias = dense(shape[1:], Constant(0.0), "bias", mp=of_bias, partial=is_partial, parts=parts)
        return {"weight": weight, "bias": bias}

    def _local_features(self, work: Work) -> tuple[float, float]:
        """Return the numbers of input and output features of this linear on one rank."""
        rows, columns = (work.mp if self.cut == cut else 1 for cut in ("rows", "columns"))
        return self.in_features / rows, self.out_features / columns

    def operation(self, name: str, part: Place, work: Work) -> Operation:
        return matmul(name, part, self._num_rows(work), *self._local_features(work))

    def _num_rows(self, work: Work) -> float:
        return work.tokens / (work.split if self.input_is_sequence_parallel else 1)

    def gradient_bytes(self, work: Work) -> float:
        """Return the bytes of the gradient of ``weight`` on one rank."""
        return math.prod(self._local_features(work)) * work.gradient_bytes

    def tape(self, work: Work, writes: str, reads: str) -> list[Step]:
        """Return the operations of the linear layer for the memory simulation
        (:mod:`ppfleetx.nn.activation_memory`)."""
        gradients = self.gradient_bytes(work)
        read, size = (
            self._num_rows(work) * width * work.activation_bytes for width in self._local_features(work)
        )

        def product(writes: str, reads: str) -> Step:
            if work.rounds_matmuls:  # keeps the rounded input
                return Step(
                    writes, size, (reads,), extra=read / 2, backward_scratch=size / 2, gradients=gradients
                )
            return Step(writes, size, (reads,), keeps=(reads,), gradients=gradients)

        if self.cut == "rows" and work.split > 1:
            whole = product(f"{writes} before the sum", reads)
            part = size / work.split
            return [whole, Step(writes, part, (whole.writes,), scratch=part if self.bias else 0.0)]
        steps = []
        if self.cut == "columns" and work.split > 1:  # the input is gathered and kept
            steps.append(Step(f"{writes}: input", work.bytes_of(self.in_features), (reads,)))
            reads = steps[0].writes
        if not (self.bias and work.on_cpu and work.mp == 1) or work.rounds_matmuls:
            return [*steps, product(writes, reads)]
        # On a CPU the bias is expanded to all rows by another product (`_add_bias` in nn/layers.py).
        bare = product(f"{writes} without bias", reads)
        return [
            *steps,
            bare,
            Step(writes, size, (bare.writes,), scratch=size, backward_scratch=size, reuses=True),
        ]


@dataclass(frozen=True)
class NormSpec:
    """Declaration of a norm over the last dimension.

    Attributes:
        kind: a value of ``Model.normalization``.
        gain: initial value of the gain.
        shares_gain_over_heads: whether this is a norm of queries or keys that normalizes each head
            separately, with one gain ``[head size]`` for all heads.
        has_gain_per_head: whether this is a norm of queries or keys with a gain ``[heads * head size]``.
            Tensor parallelism then slices the gain.
        head_size: with ``has_gain_per_head``: head size, if each head is normalized separately; None: all
            heads are normalized together, as one vector.
        before_split: whether the input has all positions, even under sequence parallelism.
    """

    kind: str
    size: int
    epsilon: float
    gain: float = 1.0
    shares_gain_over_heads: bool = False
    has_gain_per_head: bool = False
    head_size: int | None = None
    before_split: bool = False

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        """Declare ``weight`` and, if the norm has one, ``bias``. If tensor-parallel ranks share the gain but
        normalize different positions or heads, the gradients are declared as partial sums."""
        traits = NORMS.traits(self.kind)
        weight = self.gain - 1.0 if traits.zero_centered else self.gain
        values = {"weight": (Constant(weight), "norm"), "bias": (Constant(0.0), "bias")}
        sees_all = self.before_split or self.has_gain_per_head
        partial = self.shares_gain_over_heads or (sequence_parallel and not sees_all)
        mp = Shard(0) if self.has_gain_per_head else REPLICATE
        heads = range(self.size // self.head_size) if self.head_size is not None else ()
        parts = tuple(Part(str(n), 0, self.size, n * self.head_size, self.head_size) for n in heads)
        return {
            name: dense((self.size,), *values[name], mp=mp, partial=partial, parts=parts)
            for name in traits.parameters
        }

    def operation(self, name: str, part: Place, work: Work) -> Operation:
        moved = work.split_bytes_of(self.size)
        return elementwise(name, part, 2 * moved, 4 * moved)

    def tape(self, work: Work, writes: str, reads: str, size: float | None = None) -> list[Step]:
        """Return the operations of the norm for the memory simulation (:mod:`ppfleetx.nn.activation_memory`).

        Args:
            size: bytes of the input; None: the input is the hidden states at this rank's positions.
        """
        u = work.split_bytes_of(self.size) if size is None else size
        if self.head_size is not None:  # norm without gain, then the gains, all in float32
            wide = u * 4 / work.activation_bytes
            normal = f"{writes} without gain"
            one = replace(self, head_size=None).tape(work, normal, reads, wide)
            return [*one, Step(writes, u, (normal,), keeps=(normal,), backward_scratch=wide)]
        is_rms, e = self.kind.startswith("RMSNorm"), work.activation_bytes
        if not is_rms or work.on_cpu or work.fused:
            scratch, back = u if is_rms else 0.0, 2 * u if work.on_cpu else 0.0
            return [Step(writes, u, (reads,), keeps=(reads,), scratch=scratch, backward_scratch=back)]
        wide = u * 4 / e  # computed from a float32 copy
        copy = Step(f"{writes} in float32", wide, (reads,), backward_scratch=0.0)
        masked = u if e != 4 else 0.0
        out = Step(
            writes, u, (copy.writes,), (copy.writes,), extra=masked, scratch=wide, backward_scratch=2 * wide
        )
        return [copy, out]


@dataclass(frozen=True)
class TableSpec:
    """Declaration of an embedding ``[rows, width]``.

    Attributes:
        of_words: whether this is the word embedding, whose rows tensor parallelism slices. A position
            embedding is not sliced.
    """

    rows: int
    width: int
    init: Init
    of_words: bool = True

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        """Declare ``weight``."""
        kind, mp = ("word_embedding", Shard(0)) if self.of_words else ("position_embedding", REPLICATE)
        # Not a partial sum along mp: every tensor-parallel rank embeds all positions of its input.
        return {"weight": dense((self.rows, self.width), self.init, kind, mp=mp)}

    def gradient_bytes(self, work: Work) -> float:
        """Return the bytes of the gradient of ``weight`` on one rank."""
        rows = self.rows / work.mp if self.of_words else self.rows
        return rows * self.width * work.gradient_bytes
