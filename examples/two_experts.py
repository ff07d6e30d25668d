"""Two experts in every second block, and a loss that keeps both of them in use."""

from dataclasses import replace

import paddle.nn.functional as F
from paddle import nn

from ppfleetx.config.registries import ARCHITECTURES, ArchitectureTraits
from ppfleetx.models.gpt.spec import gpt_spec
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.nn.activation_memory import Step
from ppfleetx.nn.aux_loss import AuxLoss, with_aux_loss
from ppfleetx.nn.layer_spec import LinearSpec, within
from ppfleetx.nn.mlp import MLP
from ppfleetx.nn.mlp_spec import MLPSpec


class TwoExperts(nn.Layer):
    """Two MLPs, mixed as a router says at each position. Every rank has its slice of both."""

    def __init__(self, factory, spec):
        super().__init__()
        self.factory = factory
        self.router = factory.linear(spec.router)
        self.experts = nn.LayerList([MLP(factory, spec), MLP(factory, spec)])

    def forward(self, hidden):
        shares = F.softmax(self.router(hidden).astype("float32"))  # [s, b, 2]
        mixed = sum(
            expert(hidden) * shares[..., number : number + 1].astype(hidden.dtype)
            for number, expert in enumerate(self.experts)
        )
        # Of each sequence: 1 where both experts are used alike, 2 where one does everything.
        of_rows = self.factory.sum_over_positions(shares.sum(0))  # [b, 2]
        balance = 2 * (of_rows / of_rows.sum(-1, keepdim=True)).square().sum(-1)
        return with_aux_loss(mixed, AuxLoss("balance", balance, 0.01, "sequences", ("mp", "sep")))


class TwoExpertsSpec(MLPSpec):
    """What the layer has and costs, for whoever counts it before the model exists."""

    layer = TwoExperts

    @property
    def router(self):
        return LinearSpec(
            self.hidden_size, 2, "whole", bias=False, init=self.init, input_is_sequence_parallel=True
        )

    def parameters(self, *, sequence_parallel=True):
        router = self.router.parameters(sequence_parallel=sequence_parallel)
        expert = super().parameters(sequence_parallel=sequence_parallel)
        return within("router", router) | within("experts.0", expert) | within("experts.1", expert)

    def operations(self, work):
        yield self.router.operation("router", "mlp", work)
        yield from (*super().operations(work), *super().operations(work))

    def tape(self, work, writes, reads):
        steps, experts = self.router.tape(work, "shares", reads), ("first", "second")
        for expert in experts:
            steps += super().tape(work, expert, reads)
        mixed = Step(
            writes, work.split_bytes_of(self.hidden_size), ("shares", *experts), ("shares", *experts)
        )
        return [*steps, mixed]


def two_experts_spec(cfg):
    """GPT's declaration with such a layer in every second block."""
    spec = gpt_spec(cfg)
    blocks = [
        replace(block, mlp=TwoExpertsSpec(**vars(block.mlp))) if index % 2 else block
        for index, block in enumerate(spec.blocks)
    ]
    return replace(spec, blocks=tuple(blocks))


traits = ArchitectureTraits(spec=two_experts_spec, metrics=("balance",))
ARCHITECTURES.register("TwoExperts", gpt_stages, traits=traits)
