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
from ppfleetx.parallel.runner import Runner
from ppfleetx.parallel.sharding import shard_optimizer

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
    or a pipeline rank's part) -> optimizer -> its sharding -> sums of gradients -> runner.
    """
    factory = layer_factory(ctx)
    stages = task.stages(factory)
    loss_fn = partial(task.loss, token_loss=factory.token_loss)
    clip = cfg.Optimizer.grad_clip
    options = {"seed": cfg.Global.seed, "clip_norm": clip.clip_norm if clip else 0.0}
    if ctx.size_of("pp") > 1:
        return _pipeline_runner(stages, loss_fn, cfg, ctx, options, train=train)
    model = StagedModel(stages, seed=cfg.Global.seed)
    optimizer, owners = _optimizer(model.parameters(), cfg, ctx, train=train)
    sync = GradientSync(_trainable(model), ctx, owners=owners)
    return LocalRunner(model, loss_fn, optimizer, ctx, sync, **options)


def _pipeline_runner(
    stages: list[Stage],
    loss_fn: LossFunction,
    cfg: RunConfig,
    ctx: ParallelContext,
    options: dict[str, Any],
    *,
    train: bool,
) -> Runner:
    from paddle.distributed import fleet

    from ppfleetx.parallel.pipeline import PipelineLoss, PipelineRunner, StagePipeline, tied_group

    loss = PipelineLoss(loss_fn)
    model = StagePipeline(stages, ctx.plan, cfg.Global.seed, loss)
    group, names = tied_group(stages, model.bounds, ctx)
    optimizer, owners = _optimizer(model.parameters(), cfg, ctx, train=train)
    sync = GradientSync(_trainable(model), ctx, tied_group=group, tied_names=names, owners=owners)
    return PipelineRunner(fleet.distributed_model(model), loss, optimizer, ctx, sync, **options)


def _optimizer(
    parameters: Sequence[paddle.Tensor], cfg: RunConfig, ctx: ParallelContext, *, train: bool
) -> tuple[Optimizer | None, dict[str, int] | None]:
    """The optimizer, and who updates which parameter when that is shared out."""
    if not train:
        return None, None
    named = [(parameter.info.name, parameter) for parameter in parameters]
    optimizer = build_optimizer(cfg.Optimizer, named)
    owners = shard_optimizer(optimizer, ctx) if ctx.size_of("sharding") > 1 else None
    return optimizer, owners


def _trainable(model: paddle.nn.Layer) -> list[paddle.Tensor]:
    return [parameter for parameter in model.parameters() if not parameter.stop_gradient]
