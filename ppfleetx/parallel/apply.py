"""A plan applied to a task's model, in the order written here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import paddle

from ppfleetx.config.sections import RunConfig
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.models.staged import StagedModel
from ppfleetx.nn.factory import layer_factory
from ppfleetx.nn.stage import LayerFactory, Stage
from ppfleetx.optims.adamw import Optimizer
from ppfleetx.optims.build import build_optimizer
from ppfleetx.parallel.grad_sync import GradientSync
from ppfleetx.parallel.local import LocalRunner
from ppfleetx.parallel.precision import Precision
from ppfleetx.parallel.runner import Runner

LossFunction = Callable[[Any, dict[str, paddle.Tensor]], tuple[paddle.Tensor, paddle.Tensor]]


class Task(Protocol):
    """What is to be trained: a model as stages, and its loss."""

    def stages(self, factory: LayerFactory) -> list[Stage]:
        """First to last, made by ``factory``."""
        ...

    def loss(
        self, model: Any, batch: dict[str, paddle.Tensor], token_loss: Callable[..., Any]
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """(loss sum, count of valid tokens) of one micro batch; ``token_loss`` is the factory's."""
        ...


def parallelize(task: Task, cfg: RunConfig, ctx: ParallelContext, *, train: bool) -> Runner:
    """Build the model of ``task`` under the plan of ``ctx`` and return who runs it.

    The order: layers of the plan -> stages -> container with plan-free initial weights (the whole model,
    or a pipeline rank's part) -> 16-bit parameters -> optimizer -> its sharding -> sums of gradients ->
    runner. Without ``train`` there are no initial weights and no optimizer: the weights have to be restored
    before anything is run.
    """
    factory = layer_factory(ctx, train=train)
    stages = task.stages(factory)
    loss_fn = partial(task.loss, token_loss=factory.token_loss)
    precision = Precision(cfg.Engine.mix_precision)
    build = _pipeline_runner if ctx.size_of("pp") > 1 else _local_runner
    return build(stages, loss_fn, cfg, ctx, precision, train)


def _local_runner(
    stages: list[Stage],
    loss_fn: LossFunction,
    cfg: RunConfig,
    ctx: ParallelContext,
    precision: Precision,
    train: bool,
) -> Runner:
    model = StagedModel(stages, seed=cfg.Global.seed if train else None)
    optimizer, sync = _optimizer_and_sync(model, list(model.stages), cfg, ctx, precision, train)
    more = {"seed": cfg.Global.seed, "clip_norm": _clip_norm(cfg), "precision": precision}
    return LocalRunner(model, loss_fn, optimizer, ctx, sync, **more)


def _pipeline_runner(
    stages: list[Stage],
    loss_fn: LossFunction,
    cfg: RunConfig,
    ctx: ParallelContext,
    precision: Precision,
    train: bool,
) -> Runner:
    from paddle.distributed import fleet

    from ppfleetx.parallel.pipeline import PipelineLoss, PipelineRunner, StagePipeline, tied_group
    from ppfleetx.parallel.two_stages import interleave_two_stages

    loss = PipelineLoss(loss_fn)
    model = StagePipeline(stages, ctx.plan, cfg.Global.seed if train else None, loss)
    tied = tied_group(stages, ctx)
    if ctx.size_of("pp") == 2 and ctx.plan.virtual_pp_degree > 1:
        pipeline = interleave_two_stages(model, cfg.batch.accumulate_steps)
    else:
        pipeline = fleet.distributed_model(model)
    layers = [layer for _, layer in model.held_stages()]
    optimizer, sync = _optimizer_and_sync(model, layers, cfg, ctx, precision, train, *tied)
    more = {"seed": cfg.Global.seed, "clip_norm": _clip_norm(cfg), "precision": precision}
    return PipelineRunner(pipeline, loss, optimizer, ctx, sync, **more)


def _optimizer_and_sync(
    model: paddle.nn.Layer,
    layers: Sequence[paddle.nn.Layer],
    cfg: RunConfig,
    ctx: ParallelContext,
    precision: Precision,
    train: bool,
    tied_group: Any = None,
    tied_names: Sequence[str] = (),
) -> tuple[Optimizer | None, GradientSync]:
    """Who updates what is held here, and who makes gradients the job's; sharded where the plan says so."""
    parameters = model.parameters()
    trainable = [parameter for parameter in parameters if not parameter.stop_gradient]
    named = [(parameter.info.name, parameter) for parameter in parameters]
    low, on_host = precision.lowers_parameters, ctx.plan.sharding_offload
    masters = precision.lower(parameters, train=train, masters_on_host=on_host)
    optimizer = sharding = None
    if train:
        optimizer = build_optimizer(cfg.Optimizer, named, multi_precision=low, on_host=on_host)
    if ctx.size_of("sharding") > 1:
        from ppfleetx.parallel.sharding import ParameterSharding, Sharding

        group, stage = ctx.group_of("sharding"), ctx.plan.sharding_stage
        frozen = [parameter for parameter in parameters if parameter.stop_gradient]
        sharding = Sharding(trainable, group, stage, tied_names, frozen)
        if optimizer is not None:
            sharding.wrap(optimizer)
        if stage == 3:
            ParameterSharding(sharding, group, layers)
    if optimizer is not None:
        optimizer.keep_masters(masters)  # after sharding: of what is updated here
    sync = GradientSync(trainable, ctx, tied_group=tied_group, tied_names=tied_names, sharding=sharding)
    return optimizer, sync


def _clip_norm(cfg: RunConfig) -> float:
    clip = cfg.Optimizer.grad_clip
    return clip.clip_norm if clip else 0.0
