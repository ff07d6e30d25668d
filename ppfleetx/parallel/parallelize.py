"""Apply a parallel plan to a task's model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import paddle

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.registries import ARCHITECTURES
from ppfleetx.config.rules import unusable_fused_ops
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.device import supports_batched_p2p
from ppfleetx.models.gpt.spec import model_spec, parameter_specs
from ppfleetx.models.module import BasicModule
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn.fake_quant import with_quantizers
from ppfleetx.nn.fused_ops import FusedOps, choose, say
from ppfleetx.nn.init import Constant
from ppfleetx.nn.layer_factory import layer_factory
from ppfleetx.nn.matmul import Matmul, column_exchange
from ppfleetx.nn.quantized import with_quantized_weights
from ppfleetx.nn.stage import LayerFactory, Stage, first_value
from ppfleetx.optims.build import build_optimizer
from ppfleetx.optims.optimizer import Optimizer, UpdatePlace, copy_to_host
from ppfleetx.optims.param_groups import group_rows
from ppfleetx.parallel.grad_sync import GradientSync, with_model_groups
from ppfleetx.parallel.mixed_precision import Precision
from ppfleetx.parallel.step_runner import LocalRunner, StepOptions, StepRunner

if TYPE_CHECKING:
    from ppfleetx.parallel.param_broadcast import ParamBroadcast
    from ppfleetx.parallel.pipeline import StagePipeline
    from ppfleetx.parallel.sharding import Sharding
    from ppfleetx.parallel.zero3 import ParameterSharding


def parallelize(module: BasicModule, cfg: RunConfig, ctx: ParallelContext, *, train: bool) -> StepRunner:
    """Build the model of ``module`` under the parallel plan of ``ctx``, and return a runner for it. If
    ``train`` is False, the runner has no optimizer, and the caller must load the weights before running the
    model.

    Raises:
        ConfigError: the configuration does not fit the task or the device. For example, training with
            ``Model.loss_chunks`` above 1 is not possible if the loss of the task needs whole logits.
    """
    if train and cfg.Model.loss_chunks > 1 and not module.loss_in_chunks:
        raise ConfigError(
            f"{cfg.Model.module} computes its loss from whole logits; set it to 1 (a task whose loss only "
            "calls the factory's token_loss may say loss_in_chunks = True)",
            key="Model.loss_chunks",
            value=cfg.Model.loss_chunks,
        )
    factory = layer_factory(ctx, train=train)
    if train and (cfg.Distributed.mp_async_allreduce or cfg.Distributed.sp_async_reduce_scatter):
        factory.exchange = column_exchange(ctx, gathers_again=cfg.Distributed.recompute_allgather)
    precision = Precision(cfg.Engine.mix_precision)
    factory.fused = _fused_ops(cfg, ctx, precision, train)
    if train:
        # Sharding stage 3 frees values after each use. Cached 16-bit copies would remain in memory.
        keeps = precision.matmuls_only and ctx.plan.sharding_stage != 3
        casts = "weight_cast" in factory.fused.taken or keeps
        defers = ctx.size_of("pp") > 1 and ctx.plan.pp_schedule == "zb_h1"
        dtype = cfg.Engine.mix_precision.dtype if casts else None
        factory.matmul = Matmul(cast_to=dtype, fused=factory.fused, defers=defers)
    precision.cached_casts = factory.matmul.kept
    options, stages = _step_options(cfg, precision), _stages(module, factory, cfg)
    prepare = partial(
        _optimizer_and_sync, cfg=cfg, ctx=ctx, precision=precision, train=train, factory=factory
    )
    if ctx.size_of("pp") == 1:
        model = StagedModel(stages, None, empty=True)
        optimizer, sync = prepare(model, list(enumerate(model.stages)))
        return LocalRunner(model, module, factory, optimizer, ctx, sync, options)
    from ppfleetx.parallel.pipeline import PipelineLoss, PipelineRunner, StagePipeline, tied_group

    loss = PipelineLoss(module, factory)
    model = StagePipeline(stages, ctx.plan, loss)
    tied = tied_group(stages, ctx)
    pipeline = _scheduled(model, factory.matmul, cfg, ctx)
    optimizer, sync = prepare(model, model.indexed_layers(), tied_group=tied)
    return PipelineRunner(pipeline, loss, optimizer, ctx, sync, options)


def _fused_ops(cfg: RunConfig, ctx: ParallelContext, precision: Precision, train: bool) -> FusedOps:
    unused = {name: why for name, (_, why) in unusable_fused_ops(cfg).items()}
    ops = choose(cfg.Model.fused_ops, precision.types, ctx, unused)
    if train:
        say(ops)
    return ops


def _scheduled(model: StagePipeline, matmul: Matmul, cfg: RunConfig, ctx: ParallelContext) -> Any:
    from paddle.distributed import fleet

    from ppfleetx.parallel.pipeline_schedules import (
        AsyncPipeline,
        ListedPipeline,
        interleave_two_stages,
        take_turns,
    )

    if not supports_batched_p2p(ctx.device):
        take_turns()
    if cfg.Distributed.overlap_p2p_comm:
        return AsyncPipeline(model, matmul)
    if matmul.defers:
        return ListedPipeline(model, matmul)
    if ctx.size_of("pp") == 2 and ctx.plan.virtual_pp_degree > 1:
        return interleave_two_stages(model, cfg.batch.accumulate_steps)
    return fleet.distributed_model(model)


def _stages(module: BasicModule, factory: LayerFactory, cfg: RunConfig) -> list[Stage]:
    """Build the task's stages, with quantized weights or fake quantization if configured."""
    stages, quantization = module.stages(factory), cfg.Compress.quantization
    if quantization is None:
        return with_quantized_weights(stages, cfg.Compress.Weights, factory)
    # With LoRA adapters, input scales are frozen like the base weights.
    return with_quantizers(stages, quantization, factory, follows=cfg.Model.lora is None)


def _step_options(cfg: RunConfig, precision: Precision) -> StepOptions:
    clip = cfg.Optimizer.grad_clip
    spec = model_spec(cfg.Model)
    metrics = (*ARCHITECTURES.traits(cfg.Model.name).metrics, *spec.metrics)
    clip_norm = clip.clip_norm if clip else 0.0
    return StepOptions(cfg.Global.seed, clip_norm, precision, metrics, spec.routers)


def _optimizer_and_sync(
    model: paddle.nn.Layer,
    indexed_layers: Sequence[tuple[int, paddle.nn.Layer]],
    *,
    cfg: RunConfig,
    ctx: ParallelContext,
    precision: Precision,
    train: bool,
    factory: LayerFactory,
    tied_group: Any = None,
) -> tuple[Optimizer | None, GradientSync]:
    """Convert the parameters to their final dtypes, and initialize them. Return the optimizer of the
    parameters that this rank updates (None if ``train`` is False), and the object that reduces gradients."""
    parameters = model.parameters()
    ctx, has_experts = with_model_groups((parameter.spec for parameter in parameters), ctx)
    trainable = [parameter for parameter in parameters if parameter.spec.trains]
    named = [(parameter.info.name, parameter) for parameter in parameters]
    low, on_host = precision.lowers_parameters, ctx.plan.sharding_offload
    with_masters = precision.lower(parameters, train=train)
    bucket_bytes = cfg.Distributed.gradient_bucket_bytes if train else None
    optimizer = sharding = values = None
    if ctx.size_of("sharding") > 1:
        from ppfleetx.parallel.sharding import Sharding

        frozen = [parameter for parameter in parameters if not parameter.spec.trains]
        sharding = Sharding(trainable, ctx, ctx.plan.sharding_stage, frozen, bucket_bytes)
        if train:
            sharding.register_hooks(indexed_layers, factory.matmul.when_complete)
    seed = cfg.Global.seed if train else None
    masters = initialize_parameters(parameters, seed, with_masters, sharding, masters_on_host=on_host)
    if train:
        # Raises for parameter groups that match nothing. This check needs the whole model's declaration,
        # because this rank may hold only a part of the model.
        group_rows(cfg.Optimizer, parameter_specs(cfg.Model, cfg.Compress).values(), cfg.origins)
        fused = "adamw" in factory.fused.taken
        place = UpdatePlace(low, on_host, fused, lambda axis: ctx.group_over((axis,)))
        optimizer = build_optimizer(
            cfg.Optimizer, named, place, cfg.Model.num_layers, cfg.Model.width_multiplier
        )
    if sharding is not None:
        values = _values(sharding, trainable, indexed_layers, cfg, ctx)
        if optimizer is not None:
            optimizer.keep_only(sharding.owns, values.updated)
    if optimizer is not None:
        optimizer.keep_masters(masters)
    sync = GradientSync(
        trainable,
        ctx,
        tied_group=tied_group,
        has_experts=has_experts,
        sharding=sharding,
        values=values,
        bucket_bytes=bucket_bytes,
        ops=factory.fused,
    )
    return optimizer, sync


def _values(
    sharding: Sharding,
    trainable: Sequence[paddle.Tensor],
    indexed_layers: Sequence[tuple[int, paddle.nn.Layer]],
    cfg: RunConfig,
    ctx: ParallelContext,
) -> ParamBroadcast | ParameterSharding:
    from ppfleetx.parallel.param_broadcast import ParamBroadcast
    from ppfleetx.parallel.zero3 import ParameterSharding

    overlaps = cfg.Distributed.sharding.broadcast_overlap
    if ctx.plan.sharding_stage == 3:
        return ParameterSharding(sharding, indexed_layers, ahead=overlaps)
    layers = [layer for _, layer in indexed_layers] if overlaps else None
    return ParamBroadcast(trainable, sharding, layers, cfg.Distributed.broadcast_bucket_bytes)


@paddle.no_grad()
def initialize_parameters(
    parameters: Iterable[paddle.Tensor],
    seed: int | None,
    with_masters: Iterable[paddle.Tensor],
    sharding: Sharding | None,
    *,
    masters_on_host: bool = False,
) -> dict[str, paddle.Tensor]:
    """Allocate each empty parameter that this rank holds, and fill it with its initial value.

    Args:
        seed: seed of the initial values. None if a checkpoint will be loaded: zeros then replace random
            initial values.
        with_masters: parameters that need float32 master weights.
        sharding: decides which values this rank keeps; None: the rank keeps all.
        masters_on_host: whether the returned values are in host memory.

    Returns:
        The initial float32 values of the parameters ``with_masters`` that this rank owns, by canonical name.
    """
    masters: dict[str, paddle.Tensor] = {}
    wanted = {id(p) for p in with_masters if sharding is None or sharding.owns(p)}
    # Parameters are initialized one at a time, so that a rank never holds more than the values that it keeps
    # and one parameter in float32.
    for parameter in parameters:
        if parameter._is_initialized() or not (sharding is None or sharding.holds(parameter)):
            continue
        value = _constant_or_zeros(parameter) if seed is None else first_value(parameter, seed)
        if id(parameter) in wanted:
            masters[parameter.info.name] = copy_to_host(value) if masters_on_host else value
        if value.dtype != parameter.dtype:
            value = value.astype(parameter.dtype)
        parameter.get_tensor()._share_data_with(value.get_tensor())
    return masters


def _constant_or_zeros(parameter: paddle.Tensor) -> paddle.Tensor:
    init = parameter.info.init
    return paddle.full(
        parameter.shape, init.value if isinstance(init, Constant) else 0.0, dtype=parameter.dtype
    )
