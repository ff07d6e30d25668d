"""Layer factories: plain layers with whole parameters, or fleet's sliced layers under tensor parallelism. All
effects of a parallel plan on layers are in this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.mesh import Mesh
from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.config.registries import NORMS
from ppfleetx.config.sections.compress import Form, QuantizationConfig
from ppfleetx.config.sections.lora import LoraConfig
from ppfleetx.distributed.collectives import gather_rows, sum_gradient, sum_of_ranks
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn.context_parallel import AttentionStrategy, Ulysses
from ppfleetx.nn.fake_quant import FakeQuantizer, Reduce, unreduced
from ppfleetx.nn.fused_ops import NO_FUSED_OPS, FusedOps
from ppfleetx.nn.layer_spec import (
    LayerSpec,
    LinearSpec,
    NormSpec,
    Specs,
    TableSpec,
)
from ppfleetx.nn.layers import (
    Dropout,
    GroupedLinear,
    Linear,
    NoDropout,
    SlicedDropout,
    VocabParallelEmbedding,
)
from ppfleetx.nn.lora import LoraBranch
from ppfleetx.nn.lora_and_quant_specs import adapter, linear_kind, quantizer, quantizer_parameter_names
from ppfleetx.nn.loss import token_loss, token_scores
from ppfleetx.nn.loss_output import SAME_ON_MP, LossOutput
from ppfleetx.nn.matmul import Exchange, Matmul
from ppfleetx.nn.mlp_spec import GroupedLinearSpec
from ppfleetx.nn.norm import PerHeadNorm, RMSNorm, SlicedRMSNorm
from ppfleetx.nn.panel_matmul import InferenceLinear
from ppfleetx.nn.param_spec import ParamSpec, Placement, Shard, placed
from ppfleetx.nn.quantized import QuantizedEmbedding, QuantizedGroupedLinear, QuantizedLinear
from ppfleetx.nn.stage import declare
from ppfleetx.nn.token_dispatcher import TokenDispatcher

# Layers are created with zeros, because build_stage sets the initial values.
_ZEROS = nn.initializer.Constant(0.0)


def _matrix_of(linear: nn.Layer) -> ParamSpec:
    """Return the declaration of a linear's weight before quantization."""
    is_quantized = isinstance(linear, QuantizedLinear | QuantizedGroupedLinear)
    return linear.spec if is_quantized else linear.weight.spec


def layer_factory(ctx: ParallelContext, *, train: bool = True) -> LocalFactory:
    """Return the layer factory for the parallel plan of ``ctx``. If ``train`` is False, the weights of its
    layers must not change after their first use."""
    if ctx.size_of("mp") > 1:
        factory = TensorParallelFactory(ctx.group_of("mp"), ctx.plan.sequence_parallel)
    else:
        factory = LocalFactory() if train else InferenceFactory()
    if ctx.size_of("sep") > 1:
        factory.attention = Ulysses(ctx.group_of("sep"))
    factory.mesh, factory.rank = ctx.mesh, ctx.rank
    factory.experts = _token_dispatcher(ctx)
    factory.keeps_weights = not train and ctx.plan.sharding_stage < 3
    return factory


def _token_dispatcher(ctx: ParallelContext) -> TokenDispatcher:
    """Return the token dispatcher for the parallel plan of ``ctx``. In a model without experts, the groups
    ``ep`` and ``emp`` do not exist."""
    alike = ctx.group_of("mp") if ctx.size_of("mp") > 1 and not ctx.plan.sequence_parallel else None
    return TokenDispatcher(
        ep=ctx.groups.get("ep"), emp=ctx.groups.get("emp"), alike=alike, levels=ctx.levels_of("ep")
    )


class LocalFactory:
    """The :class:`~ppfleetx.nn.stage.LayerFactory` of a model without tensor parallelism.

    Attributes:
        mesh, rank: the device mesh and the number of this rank. They determine the slices of parameters.
    """

    keeps_weights = sequence_parallel = False
    mesh, rank = Mesh(), 0
    fused: FusedOps = NO_FUSED_OPS
    group: Any = None
    linear_cls: type[Linear] = Linear
    hidden_same_on: tuple[str, ...] = SAME_ON_MP

    def __init__(self) -> None:
        self.attention, self.matmul, self.experts = AttentionStrategy(), Matmul(), TokenDispatcher()

    def local_count(self, count: int, what: str) -> int:
        return count

    def declare(self, parameter: paddle.Tensor, spec: ParamSpec) -> None:
        declare(parameter, spec, self.mesh, self.rank)

    def _declared(self, layer: nn.Layer, specs: Specs) -> nn.Layer:
        for name, spec in specs.items():
            self.declare(getattr(layer, name), spec)
        return layer

    def linear(self, spec: LinearSpec) -> nn.Layer:
        layer = self.linear_cls(spec.in_features, spec.out_features, bias=spec.bias)
        return self._finished(layer, spec)

    def _finished(self, layer: nn.Layer, spec: LinearSpec) -> nn.Layer:
        specs = self._parameters(spec)
        layer.linear, layer.kind = self.matmul.linear, linear_kind(specs["weight"])
        return self._declared(layer, specs)

    def grouped_linear(self, spec: GroupedLinearSpec) -> nn.Layer:
        specs = self._parameters(spec)
        shapes = {name: placed(one, self.mesh, self.rank).local_shape for name, one in specs.items()}
        layer = GroupedLinear(shapes["weight"], shapes.get("bias"), self.matmul)
        layer.kind = linear_kind(specs["weight"])
        return self._declared(layer, specs)

    def _parameters(self, spec: LayerSpec) -> Specs:
        return spec.parameters(sequence_parallel=self.sequence_parallel)

    def quantizer(self, linear: nn.Layer, cfg: QuantizationConfig, *, follows: bool) -> FakeQuantizer:
        keeps = self.keeps_weights or linear.weight.stop_gradient
        fake = FakeQuantizer(cfg, **self._maxima(linear, cfg), follows=follows, keeps=keeps)
        matrix, split = linear.weight.spec, self.sequence_parallel
        return self._declared(
            fake, quantizer(matrix, quantizer_parameter_names(cfg), sequence_parallel=split)
        )

    def _maxima(self, linear: nn.Layer, cfg: QuantizationConfig) -> dict[str, Reduce]:
        """Return the keyword arguments ``over_weight`` and ``over_input`` of the linear's
        :class:`FakeQuantizer`. An argument that is left out, or is `unreduced`, reduces nothing."""
        return {}

    def lora(self, linear: nn.Layer, cfg: LoraConfig) -> nn.Layer:
        matrix, split = _matrix_of(linear), self.sequence_parallel
        cut, specs = matrix.placement("mp"), adapter(matrix, cfg.rank, sequence_parallel=split)
        a, b = (placed(specs[name], self.mesh, self.rank).local_shape for name in "ab")
        dropout = self.dropout(cfg.dropout, inside_heads=cut == Shard(0))
        branch = LoraBranch(
            a, b, scale=cfg.scale, dropout=dropout, join=self._join_of(cut), matmul=self.matmul
        )
        return self._declared(branch, specs)

    def _join_of(self, cut: Placement) -> Callable[[paddle.Tensor], paddle.Tensor] | None:
        """Return the function that communicates between the two matmuls of an adapter; None if none is
        needed. ``cut`` is the tensor-parallel placement of the linear's matrix."""
        return None

    def quantized_linear(self, linear: nn.Layer, form: Form) -> nn.Layer:
        made = QuantizedGroupedLinear if isinstance(linear, GroupedLinear) else QuantizedLinear
        return made(linear, form, declare=self.declare)

    def quantized_embedding(self, embedding: nn.Layer, form: Form) -> nn.Layer:
        return QuantizedEmbedding(embedding, form, declare=self.declare)

    def embedding(self, spec: TableSpec) -> nn.Layer:
        layer = nn.Embedding(spec.rows, spec.width, weight_attr=paddle.ParamAttr(initializer=_ZEROS))
        return self._declared(layer, spec.parameters())

    def norm(self, spec: NormSpec) -> nn.Layer:
        """Make a norm over the last dimension.

        Raises:
            ConfigError: the norm is not registered, or its registration declares other parameters than the
                layer has.
        """
        size, traits, specs = spec.head_size or spec.size, NORMS.traits(spec.kind), self._parameters(spec)
        layer = NORMS.make(spec.kind, size, spec.epsilon, gives=nn.Layer)
        if isinstance(layer, RMSNorm):
            layer.fused = self.fused
        parameters, declared = dict(layer.named_parameters()), traits.parameters
        if {*parameters} != {*declared} or not {*declared} <= {"weight", "bias"}:
            raise ConfigError(
                f"has the parameters {', '.join(parameters) or 'none'}, and was registered with "
                f"{', '.join(declared) or 'none'}; a norm has weight, bias, both or neither",
                key="Model.normalization",
                value=spec.kind,
            )
        if spec.head_size is not None:
            (width,) = placed(specs["weight"], self.mesh, self.rank).local_shape
            layer = PerHeadNorm(layer, width, zero_centered=traits.zero_centered)
        return self._declared(layer, specs)

    def dropout(self, probability: float, *, inside_heads: bool = False) -> nn.Layer:
        return Dropout(probability)

    def scatter_positions(self, hidden: paddle.Tensor) -> paddle.Tensor:
        return hidden

    def gather_positions(self, hidden: paddle.Tensor) -> paddle.Tensor:
        return hidden

    def enter_head(self, hidden: paddle.Tensor) -> paddle.Tensor:
        return hidden

    def tied_logits(self, hidden: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        return self.matmul.linear(self.enter_head(hidden), weight, is_transposed=True)

    def local_positions(self, ids: paddle.Tensor) -> paddle.Tensor:
        return self.attention.positions(ids)

    def sum_over_positions(self, values: paddle.Tensor) -> paddle.Tensor:
        for group in self._position_groups():
            values = sum_of_ranks(values, group)
        return values

    @paddle.no_grad()
    def all_positions(self, values: paddle.Tensor) -> paddle.Tensor:
        for group in reversed(self._position_groups()):
            values = gather_rows(values, values.shape[0], group)
        return values

    def own_positions(self, values: paddle.Tensor) -> paddle.Tensor:
        for group in self._position_groups():
            values = values.split(group.nranks, axis=0)[group.rank]
        return values

    def _position_groups(self) -> list[Any]:
        """Return the process groups whose ranks hold different positions of the same sequences."""
        return [] if self.attention.group is None else [self.attention.group]

    def token_loss(
        self, logits: paddle.Tensor, labels: paddle.Tensor, loss_mask: paddle.Tensor, true_vocab: int
    ) -> LossOutput:
        labels, loss_mask = self.local_positions(labels), self.local_positions(loss_mask)
        return token_loss(logits, labels, loss_mask, true_vocab, self.group)

    def token_scores(
        self, logits: paddle.Tensor, labels: paddle.Tensor, mask: paddle.Tensor, true_vocab: int
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        labels, mask = self.local_positions(labels), self.local_positions(mask)
        return token_scores(logits, labels, mask, true_vocab, self.group)


class InferenceFactory(LocalFactory):
    """The layer factory for evaluation and generation: layers without dropout, for constant weights."""

    linear_cls = InferenceLinear

    def dropout(self, probability: float, *, inside_heads: bool = False) -> NoDropout:
        return NoDropout()


class TensorParallelFactory(LocalFactory):
    """The factory that makes fleet's tensor-parallel layers (Shoeybi et al., 2019; sequence parallelism:
    Korthikanti et al., 2022).

    Attributes:
        exchange: overlaps the communication of column-parallel layers with computation; None: no overlap.
    """

    exchange: Exchange | None = None

    def __init__(self, group: Any, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.hidden_same_on = () if sequence_parallel else SAME_ON_MP
        self.mesh, self.rank = Mesh(ParallelPlan(mp=group.nranks)), group.rank

    def local_count(self, count: int, what: str) -> int:
        """Return how many of ``count`` items (such as attention heads) are on this rank. ``what`` names the
        items in the error.

        Raises:
            ConfigError: the items cannot be divided evenly.
        """
        if count % self.group.nranks:
            raise ConfigError(
                f"the {count} {what} do not divide by the tensor-parallel degree",
                key="Distributed.mp_degree",
                value=self.group.nranks,
            )
        return count // self.group.nranks

    def linear(self, spec: LinearSpec) -> nn.Layer:
        from paddle.distributed.fleet import meta_parallel
        from paddle.distributed.fleet.utils import sequence_parallel_utils

        if spec.cut == "whole":
            return super().linear(spec)
        prefix, options = {
            "columns": ("Column", {"gather_output": False}),
            "rows": ("Row", {"input_is_parallel": True}),
        }[spec.cut]
        cls = (
            getattr(sequence_parallel_utils, f"{prefix}SequenceParallelLinear")
            if self.sequence_parallel
            else getattr(meta_parallel, f"{prefix}ParallelLinear")
        )
        layer = cls(
            spec.in_features,
            spec.out_features,
            weight_attr=paddle.ParamAttr(initializer=_ZEROS),
            has_bias=spec.bias,
            mp_group=self.group,
            **options,
        )
        if spec.cut == "rows":
            layer.mp_skip_c_identity = True  # skips a copy of the gradient
        elif self.exchange is not None:
            layer.forward = lambda x: layer.linear(x, layer.weight, layer.bias, exchange=self.exchange)
        elif not self.sequence_parallel:  # device plugins lack fleet's c_identity in bfloat16
            layer.forward = lambda x: layer.linear(self._for_sliced_output(x), layer.weight, layer.bias)
        return self._finished(layer, spec)

    def _maxima(self, linear: nn.Layer, cfg: QuantizationConfig) -> dict[str, Reduce]:
        has_sliced_input = linear.weight.spec.placement("mp") == Shard(0)
        own_channels = cfg.weight_quantize_type == "channel_wise_abs_max" and not has_sliced_input
        return {
            "over_weight": unreduced if own_channels else self._largest,
            "over_input": self._largest if has_sliced_input else unreduced,
        }

    def _largest(self, maxima: paddle.Tensor) -> paddle.Tensor:
        from paddle import distributed

        distributed.all_reduce(maxima, op=distributed.ReduceOp.MAX, group=self.group)
        return maxima

    def _join_of(self, cut: Placement) -> Callable[[paddle.Tensor], paddle.Tensor] | None:
        return {Shard(0): self._sum_parts, Shard(1): self._for_sliced_output}.get(cut)

    def quantized_linear(self, linear: nn.Layer, form: Form) -> nn.Layer:
        """Make a quantized linear. If its input features are sliced, its output is summed over the ranks. If
        its output features are sliced, the gradient of its input is summed over the ranks. The linears of
        experts sum neither."""
        if isinstance(linear, GroupedLinear):
            return super().quantized_linear(linear, form)
        cut = linear.weight.spec.placement("mp")
        enter, leave = (self._join_of(cut) if cut == Shard(dim) else None for dim in (1, 0))
        return QuantizedLinear(linear, form, declare=self.declare, enter=enter, leave=leave)

    def quantized_embedding(self, embedding: nn.Layer, form: Form) -> nn.Layer:
        return QuantizedEmbedding(embedding, form, declare=self.declare, join=self._sum)

    def _sum(self, low: paddle.Tensor) -> paddle.Tensor:
        from paddle.distributed.fleet.layers.mpu.mp_ops import _mp_allreduce

        return _mp_allreduce(low, group=self.group, skip_c_identity_dynamic=True)

    def _sum_parts(self, low: paddle.Tensor) -> paddle.Tensor:
        from paddle.distributed.fleet.utils.sequence_parallel_utils import ReduceScatterOp

        return ReduceScatterOp.apply(low) if self.sequence_parallel else self._sum(low)

    def _for_sliced_output(self, low: paddle.Tensor) -> paddle.Tensor:
        from paddle.distributed.fleet.utils.sequence_parallel_utils import AllGatherOp

        # Both cases sum the gradient over the ranks, which hold different columns.
        return AllGatherOp.apply(low) if self.sequence_parallel else sum_gradient(low, self.group)

    def embedding(self, spec: TableSpec) -> nn.Layer:
        if not spec.of_words:
            return super().embedding(spec)
        specs = spec.parameters()
        shape = placed(specs["weight"], self.mesh, self.rank).local_shape
        return self._declared(VocabParallelEmbedding(shape, rank=self.group.rank, join=self._sum), specs)

    def norm(self, spec: NormSpec) -> nn.Layer:
        if not spec.has_gain_per_head or spec.head_size is not None:
            return super().norm(spec)
        specs = self._parameters(spec)
        (size,) = placed(specs["weight"], self.mesh, self.rank).local_shape
        layer = SlicedRMSNorm(
            size, spec.epsilon, total=spec.size, join=lambda sums: sum_gradient(self._sum(sums), self.group)
        )
        return self._declared(layer, specs)

    def dropout(self, probability: float, *, inside_heads: bool = False) -> nn.Layer:
        sliced = inside_heads or self.sequence_parallel
        return SlicedDropout(probability) if sliced else Dropout(probability)

    def scatter_positions(self, hidden: paddle.Tensor) -> paddle.Tensor:
        from paddle.distributed.fleet.utils.sequence_parallel_utils import ScatterOp

        return ScatterOp.apply(hidden) if self.sequence_parallel else hidden

    def gather_positions(self, hidden: paddle.Tensor) -> paddle.Tensor:
        from paddle.distributed.fleet.utils.sequence_parallel_utils import GatherOp

        # All ranks compute the same values from the gathered tensor, so each rank takes its part of the
        # gradient without a sum.
        return GatherOp.apply(hidden) if self.sequence_parallel else hidden

    def _position_groups(self) -> list[Any]:
        return [*super()._position_groups(), *([self.group] if self.sequence_parallel else [])]

    def enter_head(self, hidden: paddle.Tensor) -> paddle.Tensor:
        return self._for_sliced_output(hidden)

    def tied_logits(self, hidden: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        if self.exchange is None:
            return super().tied_logits(hidden, weight)
        return self.matmul.linear(hidden, weight, is_transposed=True, exchange=self.exchange)
