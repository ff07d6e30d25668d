"""Declaration of a feed-forward block: sizes, parameters and cost. No Paddle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ppfleetx.config.registries import ACTIVATIONS
from ppfleetx.nn.cost import Operation, Work, elementwise
from ppfleetx.nn.init import Init
from ppfleetx.nn.layer_spec import LinearSpec, Specs, parameters_within
from ppfleetx.nn.param_spec import Part
from ppfleetx.nn.tape import Step

GATE_AND_UP = (Part("gate", 1, 2, 0, 1), Part("up", 1, 2, 1, 1))
"""The parts of a fused gate and up, with columns ``[unit][gate, up]``."""


@dataclass(frozen=True)
class MLPSpec:
    """``fc2(activation(fc1(x)))``.

    Attributes:
        layer: the layer's class, called with the factory and this declaration; a subclass may name its own.
        hidden_size: width of the hidden states, h.
        ffn_hidden_size: inner width. With a gate, fc1 has twice as many outputs, in pairs of gate and up, so
            that any slice of whole pairs is a smaller block of the same kind.
        activation: a value of ``Model.hidden_act``.
        bias: whether both linears have a bias.
        init: initial values of fc1.
        output_init: initial values of fc2.
    """

    layer: ClassVar[str | Callable[..., Any]] = "ppfleetx.nn.mlp:MLP"

    hidden_size: int
    ffn_hidden_size: int
    activation: str
    bias: bool
    init: Init
    output_init: Init

    @property
    def is_gated(self) -> bool:
        return ACTIVATIONS.traits(self.activation).gated

    @property
    def fc1(self) -> LinearSpec:
        parts = GATE_AND_UP if self.is_gated else ()
        width = self.ffn_hidden_size * (len(parts) or 1)
        return LinearSpec(self.hidden_size, width, "columns", self.bias, self.init, parts=parts)

    @property
    def fc2(self) -> LinearSpec:
        return LinearSpec(self.ffn_hidden_size, self.hidden_size, "rows", self.bias, self.output_init)

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        layers = (("fc1", self.fc1), ("fc2", self.fc2))
        return parameters_within(layers, sequence_parallel=sequence_parallel)

    def operations(self, work: Work) -> Iterator[Operation]:
        gates, moved = 1 + self.is_gated, work.bytes_of(self.ffn_hidden_size / work.mp)
        yield self.fc1.operation("fc1", "mlp", work)
        yield elementwise("activation", "mlp", (gates + 1) * moved, (2 * gates + 1) * moved, gates)
        yield self.fc2.operation("fc2", "mlp", work)

    def tape(self, work: Work, writes: str, reads: str) -> list[Step]:
        """Steps of a forward pass; their names begin with ``writes``."""
        fc1, active = f"{writes}: fc1", f"{writes}: active"
        return [
            *self.fc1.tape(work, fc1, reads),
            *self._activation(work, active, fc1),
            *self.fc2.tape(work, writes, active),
        ]

    def _activation(self, work: Work, active: str, fc1: str) -> list[Step]:
        size, between = work.bytes_of(self.ffn_hidden_size / work.mp), f"{active} in part"
        if self.is_gated:
            if not work.on_cpu and not work.fused:  # one kernel, of a copy with gate and rest apart
                return [Step(active, size, (fc1,), keeps=(fc1,), scratch=size, back=2 * size)]
            silu = Step(between, size, (fc1,), keeps=(fc1,), back=size)
            return [silu, Step(active, size, (between, fc1), keeps=(between, fc1), back=size)]
        if self.activation == "relu2":
            relu = Step(between, size, (fc1,), keeps=(between,))
            return [relu, Step(active, size, (between,), keeps=(between,))]
        if self.activation == "quick_gelu":  # x sigmoid(1.702 x)
            sigmoid = Step(between, size, (fc1,), keeps=(between,), scratch=size, back=size)
            return [sigmoid, Step(active, size, (between, fc1), keeps=(between, fc1))]
        keeps = active if self.activation == "relu" else fc1
        return [Step(active, size, (fc1,), keeps=(keeps,))]
