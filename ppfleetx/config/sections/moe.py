"""Configuration section ``Model.moe``: mixtures of experts instead of ordinary MLPs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

from ppfleetx.config.errors import RuleError
from ppfleetx.config.field_types import (
    Bool,
    CountInt,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Size,
)
from ppfleetx.config.section import Section

BATCH_LOSSES = ("switch", "gshard", "pooled")
"""Kinds of balancing loss that need the load of each expert over the whole global batch."""


def is_router_load(name: str) -> bool:
    """Whether the parameter ``name`` stores each expert's share of the tokens. The losses in
    :data:`BATCH_LOSSES` use this share."""
    return name.endswith(".mlp.router.load")


class RouterConfig(Section):
    """The router, which chooses experts for each position. It computes in float32 even in a 16-bit run."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts: the softmax of a position's logits over all experts, or the sigmoid of each."""
    normalize: Bool = True
    """Divide the weights of the chosen experts by their sum; false: use the scores as weights (Qwen2-MoE).
    With softmax scores, true gives the softmax over the chosen logits alone (Mixtral, Qwen3-MoE,
    Megatron-LM's default)."""
    scale: PositiveFloat = 1.0
    """Multiply the weights by this (DeepSeek's `routed_scaling_factor`)."""
    bias: Bool = False
    """Give each expert a bias that is added to its score when experts are chosen, but not to its weight
    (DeepSeek-V3). The bias has no gradient; `Model.moe.bias_update_rate` updates it."""
    num_groups: Size | None = None
    """Number of equal groups of experts; a position chooses among the experts of its best groups. null: among
    all experts."""
    top_groups: Size | None = None
    """Number of best groups (with `num_groups`)."""
    group_score: Literal["max", "top2"] = "top2"
    """Score of a group: its best expert's (DeepSeek-V2), or the sum of its best two (DeepSeek-V3)."""
    jitter: Fraction = 0.0
    """In training, multiply the router's input by noise between `1 - jitter` and `1 + jitter`."""


class SharedExpertsConfig(Section):
    """All shared experts as one MLP, which every position uses in addition to its chosen experts."""

    ffn_size: Size
    """Inner width of all shared experts together."""
    gate: Bool = False
    """Multiply the output by a sigmoid of a projection of the hidden states (Qwen2-MoE)."""


class BalanceLossConfig(Section):
    """A loss that is added to the training loss to balance the load of the experts.

    Let E be the number of experts, k the number of experts that a position chooses, f an expert's share of
    all choices and P its mean score. The loss of a layer is `E * sum(f * P)`, which is 1 if all experts get
    the same share. The losses of all layers are added.
    """

    kind: Literal["sequence", "switch", "gshard", "pooled", "none"] = "sequence"
    """`sequence`: f and P are computed for each sequence, so the loss is the same under every plan and micro
    batch size. The other kinds need f over the global batch, which is known only after the step. They use f
    of the previous step, and `1 / E` in the first step. `switch`: f of each layer. `gshard`: f of each layer,
    from first choices only. `pooled`: f is the mean over all layers, and the loss is k times the mean over
    the layers (Hugging Face)."""
    weight: NonNegativeFloat = 0.01
    """Factor of the loss."""


class CapacityConfig(Section):
    """Expert capacity: a limit on how many positions of a sequence an expert takes in training.

    A position over the limit uses only the other experts it has chosen. Evaluation and generation have no
    limit.
    """

    factor: PositiveFloat
    """An expert takes `ceil(factor * top_k * positions / num_experts)` positions of a sequence."""
    policy: Literal["probs", "position"]
    """The positions that an expert keeps: those with the largest weights (probs), or the first ones
    (position)."""


class MoEConfig(Section):
    """Mixture of experts: a router sends each position to a few of many feed-forward blocks, the experts.

    Experts have the same activation and biases as an MLP (`Model.hidden_act`, `Model.add_mlp_bias`).
    Positions that do not count in the loss do not count in balancing either.
    """

    num_experts: Size
    """Number of experts of a layer."""
    top_k: Size = 2
    """Number of experts for each position."""
    expert_ffn_size: Size | None = None
    """Inner width of an expert; null: `Model.ffn_hidden_size`."""
    first_dense_layers: CountInt = 0
    """Number of layers at the beginning with an ordinary MLP."""
    layer_freq: PositiveInt = 1
    """From layer `first_dense_layers` on, every n-th layer is a mixture; the others have an ordinary MLP."""
    layers: tuple[CountInt, ...] | None = None
    """Exactly these layers are mixtures (numbered from 0); null: see the two keys above."""
    router: RouterConfig = RouterConfig()
    """The choice of experts."""
    shared_experts: SharedExpertsConfig | None = None
    """An MLP for all positions; null: none."""
    aux_loss: BalanceLossConfig = BalanceLossConfig()
    """A loss that keeps all experts in use."""
    z_loss_weight: NonNegativeFloat = 0.0
    """Factor of the mean of `logsumexp(logits)^2`, which keeps the router's logits small (Zoph et al.,
    2022)."""
    bias_update_rate: NonNegativeFloat = 0.0
    """After each step, raise `router.bias` by this number for experts with less than the mean load, and lower
    it for experts with more. This balances the load without a loss. Needs `router.bias`; DeepSeek-V3 uses
    0.001."""
    capacity: CapacityConfig | None = None
    """Limit on an expert's positions; null: nothing is dropped."""

    def __repr__(self) -> str:
        """The section as inline YAML, with only the keys that differ from their defaults."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True))

    def mixture_layers(self, num_layers: int) -> tuple[int, ...]:
        """The indices of the mixture-of-experts layers, counted from 0 across all pipeline stages."""
        if self.layers is not None:
            return tuple(sorted(self.layers))
        return tuple(range(self.first_dense_layers, num_layers, self.layer_freq))

    def normalized(self, num_layers: int, ffn_size: int) -> MoEConfig:
        """Return a normalized copy of this section: two sections that describe the same network have equal
        copies. Null values that shape the network are filled in, and keys that do not shape it get fixed
        values."""
        default = type(self).model_fields
        return self.model_copy(
            update={
                "expert_ffn_size": self.expert_ffn_size or ffn_size,
                "first_dense_layers": 0,
                "layer_freq": 1,
                "layers": self.mixture_layers(num_layers),
                "router": self.router.model_copy(update={"jitter": 0.0}),
                "capacity": None,
                **{name: default[name].default for name in ("aux_loss", "z_loss_weight", "bias_update_rate")},
            }
        )

    def violations(self) -> Iterator[RuleError]:
        if self.layers is not None and (self.first_dense_layers, self.layer_freq) != (0, 1):
            key = "first_dense_layers" if self.first_dense_layers else "layer_freq"
            yield RuleError((key, "layers"), "choose the layers by a list or by a rule, not by both")
        if self.top_k > self.num_experts:
            yield RuleError(
                ("top_k", "num_experts"),
                f"a position cannot choose {self.top_k} of {self.num_experts} experts",
            )
        if self.bias_update_rate and not self.router.bias:
            yield RuleError(("bias_update_rate", "router.bias"), "there is no bias to move; set router.bias")
        groups, top = self.router.num_groups, self.router.top_groups
        keys = ("router.num_groups", "router.top_groups")
        if (groups is None) != (top is None):
            yield RuleError(keys if groups else keys[::-1], "num_groups and top_groups are given together")
        if groups is None:
            return
        if self.num_experts % groups:
            yield RuleError(
                ("router.num_groups", "num_experts"),
                f"{self.num_experts} experts do not divide into {groups} groups",
            )
        size = self.num_experts // groups
        if top > groups:
            yield RuleError(keys[::-1], f"there are {groups} groups to choose from")
        if top * size < self.top_k:
            yield RuleError(
                ("router.top_groups", "router.num_groups", "top_k", "num_experts"),
                f"{top} of {groups} groups have {top * size} experts, and a position chooses {self.top_k}",
            )
        if self.router.group_score == "top2" and size < 2:
            yield RuleError(
                ("router.group_score", "router.num_groups", "num_experts"),
                "a group has one expert only; its score is the max",
            )
