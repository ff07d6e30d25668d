"""Declarations of an MLP and of a mixture of experts: sizes, parameters and cost. Does not import Paddle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ppfleetx.config.registries import ACTIVATIONS
from ppfleetx.config.sections.moe import BATCH_LOSSES, MoEConfig
from ppfleetx.nn.activation_memory import Step
from ppfleetx.nn.cost import Operation, Work, elementwise, matmul
from ppfleetx.nn.init import Constant, Init
from ppfleetx.nn.layer_spec import LinearSpec, Specs, parameters_within, within
from ppfleetx.nn.param_spec import PARTIAL, REPLICATE, ParamSpec, Part, Placement, Shard, dense

GATE_AND_UP = (Part("gate", 1, 2, 0, 1), Part("up", 1, 2, 1, 1))
"""The columns of gate and up in their fused projection: gate and up alternate."""


@dataclass(frozen=True)
class MLPSpec:
    """Declaration of an MLP, ``fc2(activation(fc1(x)))``.

    Attributes:
        layer: the layer class that is built from this declaration, or its ``module:class`` name. A subclass
            of the declaration can override it.
        ffn_hidden_size: inner width. With a gated activation, fc1 has twice as many outputs.
        activation: a value of ``Model.hidden_act``.
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
        """Return the operations of the MLP for the memory simulation (:mod:`ppfleetx.nn.activation_memory`).
        The output tensor is named ``writes``; names of intermediate tensors begin with ``writes``."""
        fc1, active = f"{writes}: fc1", f"{writes}: active"
        return [
            *self.fc1.tape(work, fc1, reads),
            *self._activation(work, active, fc1),
            *self.fc2.tape(work, writes, active),
        ]

    def _activation(self, work: Work, active: str, fc1: str) -> list[Step]:
        size, between = work.bytes_of(self.ffn_hidden_size / work.mp), f"{active} in part"
        if self.is_gated:
            if not work.on_cpu and not work.fused:  # one kernel, after a copy that separates gate and up
                return [Step(active, size, (fc1,), keeps=(fc1,), scratch=size, backward_scratch=2 * size)]
            silu = Step(between, size, (fc1,), keeps=(fc1,), backward_scratch=size)
            return [silu, Step(active, size, (between, fc1), keeps=(between, fc1), backward_scratch=size)]
        if self.activation == "relu2":
            relu = Step(between, size, (fc1,), keeps=(between,))
            return [relu, Step(active, size, (between,), keeps=(between,))]
        if self.activation == "quick_gelu":  # x sigmoid(1.702 x)
            sigmoid = Step(between, size, (fc1,), keeps=(between,), scratch=size, backward_scratch=size)
            return [sigmoid, Step(active, size, (between, fc1), keeps=(between, fc1))]
        keeps = active if self.activation == "relu" else fc1
        return [Step(active, size, (fc1,), keeps=(keeps,))]


@dataclass(frozen=True)
class GroupedLinearSpec:
    """Declaration of one linear layer for each expert, with ``weight [experts, in, out]``.

    Attributes:
        of_one: declaration of the linear layer of a single expert.
    """

    num_experts: int
    of_one: LinearSpec

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        """Declare ``weight`` and, if the linears have one, ``bias``."""
        one, experts = self.of_one, self.num_experts
        cut = {"columns": (Shard(2), Shard(1)), "rows": (Shard(1), REPLICATE)}[one.cut]

        def placed(shape: tuple[int, ...], init: Init, kind: str, emp: Placement) -> ParamSpec:
            of_parts = len(shape) - 1
            # Only one rank along emp adds a bias that is not sliced, so only this rank has the bias gradient.
            grad = {"edp": PARTIAL} if emp != REPLICATE else {"edp": PARTIAL, "emp": PARTIAL}
            parts = tuple(replace(part, dim=of_parts) for part in one.parts)
            return ParamSpec(shape, init, kind, {"ep": Shard(0), "emp": emp}, grad, parts)

        weight = placed((experts, one.in_features, one.out_features), one.init, one.kind, cut[0])
        if not one.bias:
            return {"weight": weight}
        return {"weight": weight, "bias": placed((experts, one.out_features), Constant(0.0), "bias", cut[1])}


@dataclass(frozen=True)
class MoESpec:
    """Declaration of a mixture of experts in place of an MLP.

    Attributes:
        num_mixtures: number of mixture-of-experts layers in the whole model.
        expert: declaration of one expert.
        shared: declaration of all shared experts as one MLP, which processes every position; None: there are
            none.
    """

    layer: ClassVar[str | Callable[..., Any]] = "ppfleetx.nn.moe:MoE"

    cfg: MoEConfig
    num_mixtures: int
    expert: MLPSpec
    shared: MLPSpec | None

    @property
    def hidden_size(self) -> int:
        return self.expert.hidden_size

    @property
    def fc1(self) -> GroupedLinearSpec:
        return GroupedLinearSpec(self.cfg.num_experts, self.expert.fc1)

    @property
    def fc2(self) -> GroupedLinearSpec:
        return GroupedLinearSpec(self.cfg.num_experts, self.expert.fc2)

    @property
    def shared_gate(self) -> LinearSpec | None:
        """The linear whose sigmoid scales the output of the shared experts; None: the output is not
        scaled."""
        if self.cfg.shared_experts is None or not self.cfg.shared_experts.gate:
            return None
        return LinearSpec(
            self.hidden_size, 1, "whole", False, self.expert.init, "router", input_is_sequence_parallel=True
        )

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that the layer reports through its auxiliary losses (``nn/aux_loss.py``)."""
        given = {
            "balance_loss": self.cfg.aux_loss.kind != "none",
            "z_loss": self.cfg.z_loss_weight > 0,
            "router_entropy": True,
            "dropped_choices": self.cfg.capacity is not None,
        }
        return tuple(name for name, is_given in given.items() if is_given)

    def router_parameters(self, *, sequence_parallel: bool = True) -> Specs:
        """Return the declarations of the router's ``weight`` and, if configured, of ``bias`` and ``load``.
        ``load`` is each expert's share of the choices in the previous step. ``bias`` and ``load`` get no
        gradients."""
        experts, routing = self.cfg.num_experts, self.cfg.router
        shape = (self.hidden_size, experts)
        specs = {"weight": dense(shape, self.expert.init, "router", partial=sequence_parallel)}

        def of_experts(kind: str, value: float) -> ParamSpec:
            return replace(dense((experts,), Constant(value), kind), trains=False, dtype="float32")

        if routing.bias:
            specs["bias"] = of_experts("router_bias", 0.0)
        if self.cfg.aux_loss.kind in BATCH_LOSSES:
            specs["load"] = of_experts("router_load", 1.0 / experts)
        return specs

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        layers = {
            "experts.fc1": self.fc1,
            "experts.fc2": self.fc2,
            "shared": self.shared,
            "shared_gate": self.shared_gate,
        }
        router = within("router", self.router_parameters(sequence_parallel=sequence_parallel))
        return router | parameters_within(layers.items(), sequence_parallel=sequence_parallel)

    @property
    def idle_size(self) -> int:
        """Number of weights, without biases, of the experts that a token is not routed to, in one layer."""
        idle = self.cfg.num_experts - self.cfg.top_k
        width = self.expert.fc1.out_features + self.expert.fc2.in_features
        return idle * self.hidden_size * width

    def operations(self, work: Work) -> Iterator[Operation]:
        expert_work, scores = self._work_of_experts(work), work.tokens / work.split * self.cfg.num_experts * 4
        moved, part = expert_work.split_bytes_of(self.hidden_size), work.split_bytes_of(self.hidden_size)
        yield matmul("router", "mlp", work.tokens / work.split, self.hidden_size, self.cfg.num_experts)
        yield elementwise("choice", "mlp", 4 * scores, 4 * scores, 6)
        yield elementwise("dispatch", "mlp", part + moved, moved + part)
        yield from self.expert.operations(expert_work)
        yield elementwise("combine", "mlp", moved + part, 2 * moved + part)
        if self.shared is not None:
            yield from self.shared.operations(work)
            yield elementwise("sum", "mlp", 3 * part, 0.0)

    def _work_of_experts(self, work: Work, load: float = 1.0) -> Work:
        """Return a copy of ``work`` for the experts on one rank. Its ``micro_batch`` is scaled to the rows
        routed to these experts. Its ``mp`` is the number of ranks that slice each expert. Sequence
        parallelism is off.

        Args:
            load: rows of this rank's experts relative to the mean over the ranks; 1: balanced.
        """
        emp = work.mp if work.emp is None else work.emp
        rows = work.micro_batch * self.cfg.top_k * emp / work.mp * load
        return replace(work, micro_batch=rows, mp=emp, sequence_parallel=False)

    def sent_bytes(self, work: Work) -> float:
        """Return the bytes of the rows that one rank sends to experts, including rows for its own experts."""
        return work.bytes_of(self.hidden_size) * self.cfg.top_k / work.mp

    def tape(self, work: Work, writes: str, reads: str) -> list[Step]:
        """Return the operations of the layer for the memory simulation
        (:mod:`ppfleetx.nn.activation_memory`), on the rank whose experts process the most rows. The output
        tensor is named ``writes``; names of intermediate tensors begin with ``writes``."""
        expert_work = self._work_of_experts(work, work.imbalance)
        size = work.split_bytes_of(self.hidden_size)
        scores = work.tokens / work.split * self.cfg.num_experts * 4
        sent, here = self.sent_bytes(work), expert_work.bytes_of(self.hidden_size)
        travels = work.ep > 1 or expert_work.mp > 1
        names = [f"{writes}: {name}" for name in ("scores", "rows", "experts", "routed")]
        there, back = (
            f"{writes}: {name}" if travels else names[at] for name, at in (("there", 1), ("back", 2))
        )
        of_experts = self.expert.tape(expert_work, names[2], there)
        gradients = float(self.hidden_size * self.cfg.num_experts * work.gradient_bytes)
        steps = [
            Step(names[0], scores, (reads,), keeps=(reads, names[0]), scratch=scores, gradients=gradients),
            Step(names[1], sent, (reads,)),
            *([Step(there, here, (names[1],))] if travels else []),
            *(
                replace(step, gradients=step.gradients * self.cfg.num_experts / work.ep)
                for step in of_experts
            ),
            *([Step(back, sent, (names[2],))] if travels else []),
            Step(names[3], size, (back, names[0]), keeps=(back,)),
        ]
        if self.shared is None:
            return [*steps, Step(writes, size, (names[3],), view=True)]
        shared = f"{writes}: shared"
        return [*steps, *self.shared.tape(work, shared, reads), Step(writes, size, (names[3], shared))]
